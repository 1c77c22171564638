"""The CUDA C++ ops as loops over blocks and threads on the host: one compilation for all tests of a
process."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ds_kfac.ops.build import sources
from ds_kfac.ops.cuda import CudaOps

FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{Path(__file__).parent}"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    "-ffp-contract=off",  # contracted, sums would differ from the GPU's
    *("-fsanitize=undefined", "-fno-sanitize-recover"),  # undefined behaviour ends the process
)


def emulated(layers: int = 512) -> CudaOps:
    """With so many layers a launch; skips the test, with the reason, where there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the CUDA source is not emulated: no C++ compiler")
    return CudaOps(_library(compiler, layers), device_type="cpu")


@cache
def _library(compiler: str, layers: int) -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        files = ["-x", "c++", *map(str, sources())]
        subprocess.run(
            [compiler, *FLAGS, f"-DDS_KFAC_LAYERS={layers}", "-o", str(path), *files], check=True
        )
        return ctypes.CDLL(str(path))
