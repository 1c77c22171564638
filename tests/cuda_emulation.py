"""The CUDA C++ ops as loops on the host."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.cuda_compile import emulation_command
from ds_kfac.ops.cuda_library import CudaLibrary


def emulated(folder: Path, *options: str) -> CudaOps:
    """Compiled into ``folder``; skips the test, with the reason, where there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the CUDA source is not emulated: no C++ compiler")
    path = folder / "library.so"
    subprocess.run(emulation_command(compiler, path, *options), check=True)
    return CudaOps(CudaLibrary(ctypes.CDLL(str(path))), device_type="cpu")
