"""The index arithmetic of the CUDA kernels, compiled for the host, against the formula."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ds_kfac.ops.build import source_folder
from ds_kfac.ops.functional import packed_numel

HARNESS = """
#include "launch.h"
using namespace ds_kfac;
extern "C" void rows_of(const int64_t *indices, int64_t *rows, int64_t count) {
    for (int64_t i = 0; i < count; ++i) rows[i] = row_of(indices[i]);
}
extern "C" void walk(int64_t start, int64_t step, int64_t count, int64_t *rows, int64_t *columns) {
    Cursor cursor(start);
    for (int64_t i = 0; i < count; ++i, cursor.advance(step)) rows[i] = cursor.row, columns[i] = cursor.column;
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("index arithmetic is not tested: no C++ compiler")
    folder = tmp_path_factory.mktemp("index")
    (folder / "harness.cpp").write_text(HARNESS)
    command = [
        compiler,
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=undefined",
        "-shared",
        "-fPIC",
    ]
    # its headers, and the emulation of CUDA's
    found_in = [f"-I{source_folder()}", f"-I{Path(__file__).parent}"]
    files = ["-o", str(folder / "harness.so"), str(folder / "harness.cpp")]
    subprocess.run([*command, "-fno-sanitize-recover", *found_in, *files], check=True)
    return ctypes.CDLL(str(folder / "harness.so"))


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def rows_of(harness, indices: torch.Tensor) -> torch.Tensor:
    rows = torch.empty_like(indices)
    harness.rows_of(address(indices), address(rows), ctypes.c_int64(len(indices)))
    return rows


def test_the_row_of_every_element_of_a_large_triangle(harness):
    dim = 3000
    assert torch.equal(
        rows_of(harness, torch.arange(packed_numel(dim))), torch.tril_indices(dim, dim)[0]
    )


def test_the_row_of_both_ends_of_every_row_up_to_the_widest_triangle(harness):
    rows = torch.arange(1 << 20)
    first = rows * (rows + 1) // 2
    assert torch.equal(rows_of(harness, first), rows)
    assert torch.equal(rows_of(harness, first + rows), rows)


@pytest.mark.parametrize("dim", [1, 2, 63, 129, 257, 300])
@pytest.mark.parametrize("step", [1, 7, 256])
def test_a_cursor_visits_row_and_column_of_every_step(harness, dim, step):
    expected = torch.tril_indices(dim, dim)
    for start in (0, packed_numel(dim) // 2, packed_numel(dim) - 1):
        wanted = expected[:, start::step]
        found = torch.empty_like(wanted).contiguous()
        arguments = (ctypes.c_int64(value) for value in (start, step, wanted.shape[1]))
        harness.walk(*arguments, address(found[0]), address(found[1]))
        assert torch.equal(found, wanted)


def test_a_cursor_far_down_a_wide_triangle(harness):
    for row in (46_341, 100_003, (1 << 20) - 2):  # beyond 31 and 32 bits
        start, found = packed_numel(row) + 5, torch.empty(2, 3, dtype=torch.int64)
        harness.walk(
            ctypes.c_int64(start),
            ctypes.c_int64(row),
            ctypes.c_int64(3),
            address(found[0]),
            address(found[1]),
        )
        for place in (0, 1, 2):
            r, c = found[:, place].tolist()
            assert 0 <= c <= r and packed_numel(r) + c == start + place * row
