"""Every Triton kernel in its shipped configurations, compiled for devices that are not there. Spills are errors."""

from collections.abc import Callable

import pytest
import torch

from tests.triton_tools import Compiled, compiling, inspected, tool

pytest.importorskip("triton", reason="triton is not installed: its kernels are not compiled")

from ds_kfac.ops.reference import packed_numel
from ds_kfac.ops.triton import corrected_scale, eigen_scale, patch_syrk, syrk
from ds_kfac.ops.triton.syrk import SyrkConfig, config_for

ARCHITECTURES = (80, 90, 100)
SHARED_PER_MULTIPROCESSOR = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
TENSOR_CORE = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
REGISTERS = 65536


def accumulate(dim: int, dtype: torch.dtype, rows: int = 2048) -> None:
    x, total = torch.empty(rows, dim, dtype=dtype), torch.empty(packed_numel(dim + 1))
    syrk.syrk_accumulate_(total, x, ones_column=torch.ones(rows, 1))


SYRK: dict[str, tuple[Callable[[], None], int, torch.dtype]] = {
    "small": (lambda: accumulate(256, torch.bfloat16), 256, torch.bfloat16),
    "split": (lambda: accumulate(1024, torch.bfloat16), 1024, torch.bfloat16),
    "large": (lambda: accumulate(4096, torch.float16), 4096, torch.float16),
    "small, not split": (lambda: accumulate(256, torch.bfloat16, rows=16), 256, torch.bfloat16),
    "fp32": (lambda: accumulate(256, torch.float32), 256, torch.float32),
    "fp32, not split": (lambda: accumulate(256, torch.float32, rows=16), 256, torch.float32),
}


def scale(rows: int, columns: int, transposed: bool, exponent: float) -> None:
    x = torch.empty(columns, rows).T if transposed else torch.empty(rows, columns)
    values, number = (torch.empty(rows), torch.empty(columns)), torch.empty(())
    eigen_scale.eigen_scale_dot(x, *values, number, exponent=exponent, split=columns - 1)
    corrected_scale.corrected_scale_dot(x, torch.empty_like(x), number, number, number, exponent=exponent)


SCALE = {"wide": lambda: scale(768, 769, False, 0.5), "narrow": lambda: scale(64, 3072, True, 0.3)}


def compile_one(arch: int, launch: Callable[[], None]) -> list[Compiled]:
    with compiling(arch) as done:
        launch()
    assert done
    return done


def needs_disassembler() -> None:
    for name in ("cuobjdump", "nvdisasm"):
        if tool(name) is None:
            pytest.skip(f"compiled without spills; {name} is missing, so registers and instructions are not checked")


def fits(config: SyrkConfig, compiled: Compiled, registers: int, arch: int) -> bool:
    """Whether a multiprocessor holds as many programs as the configuration says. A program has 1 KB more."""
    shared = config.resident * (compiled.shared + 1024) <= SHARED_PER_MULTIPROCESSOR[arch]
    return shared and config.resident * config.warps * 32 * -(-registers // 8) * 8 <= REGISTERS


def assert_multiplies(instructions: int, config: SyrkConfig, dtype: torch.dtype) -> None:
    """16-bit rows on tensor cores, 16 rows an instruction; fp32 rows elsewhere."""
    assert instructions >= config.chunk // 16 if dtype != torch.float32 else instructions == 0


@pytest.mark.parametrize("case", SYRK)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_syrk_does_not_spill_and_multiplies_on_tensor_cores(arch, case, tmp_path):
    launch, dim, dtype = SYRK[case]
    (compiled,) = compile_one(arch, launch)
    needs_disassembler()
    registers, code = inspected(compiled.cubin, tmp_path)
    print(f"{compiled.name} {case} sm_{arch}: {registers} registers, {compiled.shared} bytes shared")
    assert code["STL"] == code["LDL"] == 0
    config = config_for(dtype, dim, arch)
    assert fits(config, compiled, registers, arch)
    assert_multiplies(code[TENSOR_CORE[arch]], config, dtype)
    assert bool(code["RED"] + code["REDG"]) == (case in ("small", "split", "fp32"))  # programs share tiles: atomic
    assert code["LDGSTS"] > 0  # rows arrive while others are multiplied


@pytest.mark.parametrize("case", SCALE)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scaling_does_not_spill_and_leaves_room_for_many_programs(arch, case, tmp_path):
    done = compile_one(arch, SCALE[case])
    assert len(done) == 2
    needs_disassembler()
    for compiled in done:
        registers, code = inspected(compiled.cubin, tmp_path)
        print(f"{compiled.name} {case} sm_{arch}: {registers} registers")
        assert code["STL"] == code["LDL"] == 0
        assert registers <= 96


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_patch_syrk_does_not_spill_and_multiplies_on_tensor_cores(arch, dtype, tmp_path):
    def launch() -> None:
        x, total = torch.empty(16, 64, 14, 14, dtype=dtype), torch.empty(packed_numel(577))
        patch_syrk.patch_syrk_accumulate_(total, x, kernel=(3, 3), padding=(1, 1), ones=True)

    (compiled,) = compile_one(arch, launch)
    needs_disassembler()
    registers, code = inspected(compiled.cubin, tmp_path)
    print(f"{compiled.name} {dtype} sm_{arch}: {registers} registers, {compiled.shared} bytes shared")
    assert code["STL"] == code["LDL"] == 0
    assert fits(patch_syrk.patch_config(), compiled, registers, arch)
    assert_multiplies(code[TENSOR_CORE[arch]], patch_syrk.patch_config(), dtype)


def test_a_kernel_that_spills_is_an_error():
    """The check checks: 24 registers are too few."""
    with pytest.raises(Exception, match="Registers are spilled"), compiling(90, maxnreg=24):
        eigen_scale.eigen_scale(torch.empty(64, 64), torch.empty(64), torch.empty(64), 0.1)
