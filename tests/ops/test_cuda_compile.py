"""csrc/cuda compiles for every architecture without warnings or spilled registers, and loads
without a driver."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from ds_kfac.ops import build
from ds_kfac.ops.build import ARCHITECTURES, find_nvcc, nvcc_flags, sources
from ds_kfac.ops.cuda import CudaError, CudaOps

STRICT = (
    *("-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"),
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror",
)
"""A warning is an error, so are registers spilled to memory; ptxas says how many registers a kernel
takes."""
MOST_REGISTERS = 96
"""Two and a half blocks of 256 threads per multiprocessor, with 16 loads in flight each."""


def compiled(files, architectures, folder):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("csrc/cuda is not compiled: no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    command = [
        nvcc,
        *nvcc_flags(architectures),
        *STRICT,
        "-o",
        str(folder / "library.so"),
        *map(str, files),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """One compilation for all architectures: its status, what the compiler said, and the file. A
    good one is kept in the build folder until sources or flags change."""
    kept = build.folder() / build.library_name([str(find_nvcc()), *ARCHITECTURES, *STRICT])
    if kept.exists():
        return 0, kept.with_suffix(".log").read_text(), kept
    folder = tmp_path_factory.mktemp("cuda")
    status, log = compiled(sources(), ARCHITECTURES, folder)
    if status == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".log").write_text(log)
        shutil.move(folder / "library.so", kept)
    return status, log, kept


def test_compiles_for_every_architecture_without_warnings_or_spills(library):
    status, log, _ = library
    assert status == 0, log
    assert set(re.findall(r"for '(sm_\w+)'", log)) == {
        f"sm_{architecture}" for architecture in ARCHITECTURES
    }
    assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)) == {
        ("0", "0")
    }
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == len(re.findall(r"Compiling entry function", log)) > len(ARCHITECTURES)
    assert max(registers) <= MOST_REGISTERS, registers
    print(f"{len(registers)} kernels, {min(registers)} to {max(registers)} registers")


def test_the_compiled_library_loads_without_a_driver_and_names_its_errors(library):
    if torch.cuda.is_available():
        pytest.skip("launching works here: there is a GPU")
    ops = CudaOps(ctypes.CDLL(str(library[2])), device_type="cpu")
    with pytest.raises(
        CudaError, match=r"pack: cuda(ErrorInsufficientDriver \(35\)|ErrorNoDevice \(100\)): "
    ):
        ops.symmetric_pack_into_(torch.zeros(6), [0], [torch.zeros(3, 3)])
    with pytest.raises(CudaError, match=r"ema_update: cudaError\w+ \(\d+\): "):
        ops.ema_update_(
            [torch.zeros(6)], [torch.zeros(6)], [torch.ones(())], [torch.ones(())], [0.9]
        )


def test_a_warning_is_an_error(tmp_path):
    source = tmp_path / "warns.cu"
    source.write_text("__global__ void kernel(float *x) { int unused; *x = 1; }\n")
    status, log = compiled([source], ["90a"], tmp_path)
    assert status != 0 and 'variable "unused" was declared but never referenced' in log


def test_spilled_registers_are_an_error(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024) kernel(float *x, int n) {\n"
        "    float kept[200];\n"
        '    _Pragma("unroll") for (int i = 0; i < 200; ++i) kept[i] = x[i * n];\n'
        "    __syncthreads();\n"
        '    _Pragma("unroll") for (int i = 0; i < 200; ++i) x[i + n] = kept[199 - i];\n'
        "}\n"
    )
    status, log = compiled([source], ["90a"], tmp_path)
    assert status != 0 and re.search("Registers are spilled|Local memory", log), log
