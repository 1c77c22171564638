"""The library of csrc/cuda as DeepSpeed's OpBuilder describes its own, with the same methods.

It is not derived from it: that links libtorch, which this library does not know, and setup.py must run where neither
torch nor DeepSpeed is installed. Of the standard library alone.
"""

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ds_kfac.ops import build
from ds_kfac.ops.build import BuildError
from ds_kfac.ops.cuda_compile import ARCHITECTURES, nvcc, nvcc_flags


class CUDABuilder:
    """Builds and finds csrc/cuda, a library for each architecture.

    Args:
        architecture: of the GPU, as nvcc names it, e.g. "90a"; None: there is none, and no library to load.

    Attributes:
        NAME: of the report.
        BUILD_VAR: environment variable; 1 compiles when the package is installed, 0 does not, whatever
            ``DS_KFAC_BUILD_OPS`` says.
        error_log: why :meth:`is_compatible` last said no.
    """

    NAME, BUILD_VAR, PART = "kfac_cuda", "DS_KFAC_BUILD_CUDA", "cuda"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture
        self.error_log: str | None = None

    def absolute_name(self) -> str:
        """Where a library that was built ahead of time lies."""
        return f"ds_kfac.ops.built.{self.PART}"

    def sources(self) -> list[str]:
        """Relative to ``csrc``'s parent folder."""
        files = sorted(build.find_sources(self.PART).iterdir())
        return [f"csrc/{self.PART}/{file.name}" for file in files if file.suffix != ".h"]

    def include_paths(self) -> list[str]:
        return [f"csrc/{self.PART}"]

    def nvcc_args(self, architecture: str) -> list[str]:
        return nvcc_flags([architecture])

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it can be loaded here or built: neither needs the device that it is for."""
        self.error_log = None
        try:
            if self.installed() is None:
                build.find_sources(self.PART)
                nvcc()
        except BuildError as problem:
            self.error_log = str(problem)
            if verbose:
                print(f" [WARNING]  {self.NAME}: {problem}")
        return self.error_log is None

    def installed(self) -> Path | None:
        """For this GPU or an older one of its generation, whose code runs here too; for any where there is no GPU."""
        for name in runs_on(self.architecture) if self.architecture else ARCHITECTURES:
            if path := build.find(build.library_name(self.PART, self.nvcc_args(name)), [build.BUILT]):
                return path
        return None

    def build_ahead(self, into: Path) -> list[Path]:
        """Compile for all architectures that the environment names. Raises BuildError."""
        names = wanted_architectures(os.environ) or supported(nvcc())
        return [build.build(self.PART, nvcc, self.nvcc_args(name), into=into) for name in names]

    def path(self) -> Path:
        """Of the library for this machine, built ahead of time or now. Raises BuildError."""
        if self.architecture is None:
            raise BuildError("there is no GPU to build it for")
        return self.installed() or build.build(self.PART, nvcc, self.nvcc_args(self.architecture))

    def load(self, verbose: bool = False) -> ctypes.CDLL:
        """Raises RuntimeError: it cannot be built or loaded, and why."""
        path = self.path()
        if verbose:
            print(f"{self.NAME}: {path}")
        try:
            return ctypes.CDLL(str(path))
        except OSError as problem:
            raise RuntimeError(f"its library does not load: {problem}") from problem


def runs_on(architecture: str) -> list[str]:
    """Architectures whose machine code a GPU runs, its own first: 86 is its own and 80. What ends in a letter is for
    that GPU alone."""
    if not architecture.isdigit():
        return [architecture]
    major, minor = divmod(int(architecture), 10)
    return [f"{major}{lower}" for lower in range(minor, -1, -1)]


def wanted_architectures(environment: Mapping[str, str]) -> list[str]:
    """Of ``TORCH_CUDA_ARCH_LIST``, e.g. "8.0;9.0+PTX": 80 and 90a; empty where it is not set.

    Raises:
        BuildError: an entry that is no capability from 8.0 on.
    """
    names = []
    for entry in re.split(r"[;\s]+", environment.get("TORCH_CUDA_ARCH_LIST", "").strip()):
        found = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", entry)
        if entry and (found is None or int(found[1]) < 8):
            raise BuildError(
                f'TORCH_CUDA_ARCH_LIST has "{entry}"; expected capabilities from 8.0 on, such as "8.0;9.0"'
            )
        if found is not None:
            names.append(f"{found[1]}{found[2]}{'a' if found[1] == '9' else found[3]}")
    return list(dict.fromkeys(names))


def supported(compiler: str) -> list[str]:
    """Those of ``ARCHITECTURES`` that this nvcc knows; all of them if it does not list them."""
    try:
        said = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return list(ARCHITECTURES)
    known = said.stdout.split()
    return [name for name in ARCHITECTURES if f"sm_{name.rstrip('a')}" in known] or list(ARCHITECTURES)


def build_ahead(into: Path, environment: Mapping[str, str]) -> list[Path]:
    """What ``pip install`` compiles, as with ``DS_BUILD_OPS`` and ``DS_BUILD_<OP>``: with ``DS_KFAC_BUILD_OPS=1`` if it
    can be, with the builder's own variable in any case.

    Raises:
        BuildError: it was asked for by its own variable and cannot be built.
    """
    builder, built = CUDABuilder(), []
    into.mkdir(parents=True, exist_ok=True)
    asked = environment.get(builder.BUILD_VAR)
    if (asked or environment.get("DS_KFAC_BUILD_OPS", "0")) == "1":
        if builder.is_compatible(verbose=asked is None):
            built = builder.build_ahead(into)
        elif asked:
            raise BuildError(f"{builder.BUILD_VAR}=1, but {builder.NAME} cannot be built: {builder.error_log}")
    for lock in into.glob("*.lock"):
        lock.unlink()
    return built


def rows(builder: CUDABuilder) -> list[tuple[str, ...]]:
    """For the report: name, built ahead of time, can be used or built, and why not."""
    compatible = builder.is_compatible()
    ahead = builder.installed() if compatible else None
    return [
        ("op library", "installed", "compatible", ""),
        (builder.NAME, "yes" if ahead else "no", "yes" if compatible else "no", builder.error_log or ""),
    ]
