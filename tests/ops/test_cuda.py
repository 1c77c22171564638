"""csrc/cuda compiles for every architecture without warnings or spilled registers, and loads
without a driver. Its index arithmetic holds up to the widest triangle."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ds_kfac.ops import build
from ds_kfac.ops.build import ARCHITECTURES, find_nvcc, nvcc_flags, sources
from ds_kfac.ops.cuda import CudaError, CudaOps
from ds_kfac.ops.functional import packed_numel

STRICT = (
    *("-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"),
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror",
)
"""A warning is an error, so are registers spilled to memory; ptxas says how many registers a kernel
takes."""
MOST_REGISTERS = 96
"""Two and a half blocks of 256 threads per multiprocessor, with 16 loads in flight each."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """One compilation for all architectures: its status, what the compiler said, and the file. A
    good one is kept in the build folder until sources or flags change."""
    kept = build.folder() / build.library_name([str(find_nvcc()), *ARCHITECTURES, *STRICT])
    if kept.exists():
        return 0, kept.with_suffix(".log").read_text(), kept
    nvcc, made = find_nvcc(), tmp_path_factory.mktemp("cuda") / "library.so"
    if nvcc is None:
        pytest.skip("csrc/cuda is not compiled: no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    command = [nvcc, *nvcc_flags(ARCHITECTURES), *STRICT, "-o", str(made), *map(str, sources())]
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".log").write_text(log)
        shutil.move(made, kept)
    return done.returncode, log, kept


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
    no_gpu = r"pack: cuda(ErrorInsufficientDriver \(35\)|ErrorNoDevice \(100\)): "
    with pytest.raises(CudaError, match=no_gpu):
        ops.symmetric_pack_into_(torch.zeros(6), [0], [torch.zeros(3, 3)])


INDICES = """
#include "launch.h"
using namespace ds_kfac;
extern "C" void walk(int64_t start, int64_t step, int64_t count, int64_t *places) {
    Cursor cursor(start);
    for (int64_t i = 0; i < count; ++i, cursor.advance(step)) {
        places[2 * i] = cursor.row;
        places[2 * i + 1] = cursor.column;
    }
}
"""


def test_a_cursor_begins_at_both_ends_of_rows_up_to_the_widest_triangle(tmp_path):
    """Compiled for the host."""
    compiler = shutil.which("g++") or pytest.skip("index arithmetic is not tested: no g++")
    (tmp_path / "walk.cpp").write_text(INDICES)
    headers = [f"-I{build.source_folder()}", f"-I{Path(__file__).parent}"]
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fsanitize=undefined", *headers]
    files = ["-fno-sanitize-recover", "-o", "walk.so", "walk.cpp"]
    subprocess.run([compiler, *flags, *files], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "walk.so"))

    def walked(start: int, step: int) -> list[list[int]]:
        """Row and column of two places."""
        found = torch.empty(2, 2, dtype=torch.int64)
        numbers = [ctypes.c_int64(number) for number in (start, step, 2)]
        library.walk(*numbers, ctypes.c_void_p(found.data_ptr()))
        return found.tolist()

    for row in (*range(0, 1 << 20, 997), 46_341, 100_003, (1 << 20) - 2):  # beyond 32 bits
        for column in (0, row):
            start = packed_numel(row) + column
            first, (second, d) = walked(start, row + 1)
            assert first == [row, column]
            assert 0 <= d <= second and packed_numel(second) + d == start + row + 1
