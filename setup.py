"""All metadata is in pyproject.toml. This adds ds_kfac.pth, which DS_KFAC=1 works by, the sources
of the native ops, and their libraries if asked for.

DS_KFAC_BUILD_OPS=1 compiles the CUDA ops if that is possible here, DS_KFAC_BUILD_CUDA=1 compiles
them or fails. TORCH_CUDA_ARCH_LIST names the GPUs, e.g. "8.0;9.0".
"""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def builders():
    """ds_kfac.ops.build without the package's root, which needs torch and DeepSpeed: they may not
    be there yet."""
    for name in ("ds_kfac", "ds_kfac.ops"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    return import_module("ds_kfac.ops.build")


class BuildPyWithOps(build_py):
    """Puts ``csrc`` into the package, where ops are compiled from at first use, and libraries that
    are built now."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout has csrc, and compiles at first use
            shutil.copy(ROOT / "ds_kfac.pth", self.get_finalized_command("install").install_purelib)
            return
        shutil.copy(ROOT / "ds_kfac.pth", self.build_lib)
        package = Path(self.build_lib) / "ds_kfac"
        shutil.copytree(ROOT / "csrc", package / "csrc", dirs_exist_ok=True)
        if any(name.startswith("DS_KFAC_BUILD_") for name in os.environ):
            for library in builders().build_ahead(package / "ops" / "built", os.environ):
                print("built", library)


class WithOps(Distribution):
    """A wheel with libraries in it is for this platform."""

    def has_ext_modules(self) -> bool:
        return any(
            name.startswith("DS_KFAC_BUILD_") and value == "1" for name, value in os.environ.items()
        )


setup(cmdclass={"build_py": BuildPyWithOps}, distclass=WithOps)
