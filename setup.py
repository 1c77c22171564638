"""All metadata is in pyproject.toml. This adds the sources of the native ops; DS_KFAC_BUILD_OPS=1 builds them too."""

import importlib.util
import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildPyWithOps(build_py):
    """Puts ``csrc`` into the package, where ops are compiled from at first use, and libraries that are built now."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout has csrc, and compiles at first use
            return
        package = Path(self.build_lib) / "ds_kfac"
        shutil.copytree(ROOT / "csrc", package / "csrc", dirs_exist_ok=True)
        if os.environ.get("DS_KFAC_BUILD_OPS") == "1":
            specification = importlib.util.spec_from_file_location("build_ops", ROOT / "ds_kfac" / "ops" / "build.py")
            build_ops = importlib.util.module_from_spec(specification)
            specification.loader.exec_module(build_ops)
            print("built", build_ops.build_cpu(into=package / "ops" / "built"))


setup(cmdclass={"build_py": BuildPyWithOps})
