"""csrc/cuda compiles for every architecture without warnings or spilled registers, and loads without a driver."""

import re
import subprocess

import pytest

from ds_kfac.ops.cuda_compile import ARCHITECTURES, STRICT, find_nvcc, nvcc_flags, sources

MOST_REGISTERS = 96
"""Two and a half blocks of 256 threads per multiprocessor, with 16 loads in flight each."""


@pytest.fixture(scope="module")
def nvcc():
    found = find_nvcc()
    if found is None:
        reason = "csrc/cuda is not compiled: no nvcc (CUDA_HOME, PATH, /usr/local/cuda)"
        print(reason)
        pytest.skip(reason)
    return found


def compiled(nvcc, files, architecture, folder, *options):
    command = [nvcc, *nvcc_flags([architecture]), *options, "-o", str(folder / "library.so"), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_warnings_or_spills(nvcc, architecture, tmp_path):
    done = compiled(nvcc, sources(), architecture, tmp_path, *STRICT)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert set(re.findall(r"for '(sm_\w+)'", log)) == {f"sm_{architecture}"}
    assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)) == {("0", "0")}
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert registers and max(registers) <= MOST_REGISTERS, registers
    print(f"sm_{architecture}: {len(registers)} kernels, {min(registers)} to {max(registers)} registers")


def test_a_warning_is_an_error(nvcc, tmp_path):
    source = tmp_path / "warns.cu"
    source.write_text("__global__ void kernel(float *x) { int unused; *x = 1; }\n")
    assert compiled(nvcc, [source], "90a", tmp_path).returncode == 0
    assert compiled(nvcc, [source], "90a", tmp_path, *STRICT).returncode != 0


def test_spilled_registers_are_an_error(nvcc, tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024) kernel(float *x, int n) {\n"
        "    float kept[200];\n"
        '    _Pragma("unroll") for (int i = 0; i < 200; ++i) kept[i] = x[i * n];\n'
        "    __syncthreads();\n"
        '    _Pragma("unroll") for (int i = 0; i < 200; ++i) x[i + n] = kept[199 - i];\n'
        "}\n"
    )
    assert compiled(nvcc, [source], "90a", tmp_path).returncode == 0
    assert compiled(nvcc, [source], "90a", tmp_path, *STRICT).returncode != 0
