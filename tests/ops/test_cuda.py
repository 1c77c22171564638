"""csrc/cuda compiles for every architecture without warnings or spilled registers, and loads
without a driver. Its index arithmetic holds in wide triangles."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from ds_kfac.ops import build, functional
from ds_kfac.ops.build import ARCHITECTURES, find_nvcc, nvcc_flags, sources
from ds_kfac.ops.cuda import CudaError, CudaOps
from ds_kfac.ops.functional import packed_numel
from tests.ops.cuda_emulation import emulated

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


def test_places_are_right_where_a_float_no_longer_holds_their_number():
    """Beyond 2^24 elements: the first and the last rows of a wide triangle, emulated."""
    dim = 6000
    x = torch.zeros(dim, dim)
    rows = torch.arange(dim).float()
    x[:, 0], x[:, 1], x.diagonal()[:] = rows, -rows, rows + 0.5
    ours, torchs = torch.zeros(2, packed_numel(dim))
    emulated().symmetric_pack_into_(ours, [0], [x])
    functional.symmetric_pack_into_(torchs, [0], [x])
    assert torch.equal(ours, torchs)
