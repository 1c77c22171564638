"""Every Triton kernel in its shipped configurations, compiled for devices that are not there. Spills are errors."""

from collections.abc import Callable

import pytest
import torch

from tests.triton_tools import Compiled, compiling, inspected, tool

pytest.importorskip("triton", reason="triton is not installed: its kernels are not compiled")

from ds_kfac.ops.reference import packed_numel
from ds_kfac.ops.triton import adam_scale, corrected_scale, eigen_scale, patch_syrk, syrk
from ds_kfac.ops.triton.syrk_configs import CHOSEN, SHIPPED, SyrkConfig, config_for, describable, family

ARCHITECTURES = (80, 90, 100)
SHARED_PER_MULTIPROCESSOR = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
TENSOR_CORE = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
REGISTERS = 65536


def scale(rows: int, columns: int, transposed: bool, exponent: float) -> None:
    x = torch.empty(columns, rows).T if transposed else torch.empty(rows, columns)
    values, number = (torch.empty(rows), torch.empty(columns)), torch.empty(())
    eigen_scale.eigen_scale_dot(x, *values, number, exponent=exponent, split=columns - 1)
    corrected_scale.corrected_scale_dot(x, torch.empty_like(x), number, number, number, exponent=exponent)
    state = (torch.empty_like(x), torch.empty_like(x), number, torch.tensor(True))
    for nesterov in (False, True):
        adam_scale.adam_scale(x, *state, betas=(0.9, 0.99), eps=1e-8, nesterov=nesterov)


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


def shipped() -> list[tuple[int, str, SyrkConfig]]:
    """(architecture, family, configuration): all of them, and those that rows without a descriptor get."""
    found = []
    for arch in ARCHITECTURES:
        for name in (f"sm_{arch}", "fp32"):
            plain = [config.plain() for _, config in CHOSEN[name].by_side]
            found += [(arch, name, config) for config in dict.fromkeys((*SHIPPED[name], *plain))]
    return found


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("arch", "name", "config"), shipped())
def test_syrk_does_not_spill_and_multiplies_on_tensor_cores(arch, name, config, split, tmp_path, monkeypatch):
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    dtype = torch.float32 if name == "fp32" else (torch.bfloat16, torch.float16)[split == 1]
    x, total = torch.empty(2048, 1024, dtype=dtype), torch.empty(packed_numel(1025))
    scale = 1.0 if split == 1 else torch.ones(())
    (compiled,) = compile_one(arch, lambda: syrk.accumulate(total, x, torch.ones(2048, 1), config, scale))
    needs_disassembler()
    registers, code = inspected(compiled.cubin, tmp_path)
    print(f"{compiled.name} {config} sm_{arch}: {registers} registers, {compiled.shared} bytes shared")
    assert code["STL"] == code["LDL"] == 0
    assert fits(config, compiled, registers, arch)
    assert_multiplies(code[TENSOR_CORE[arch]], config, dtype)
    assert bool(code["RED"] + code["REDG"]) == (split > 1)  # programs share tiles: atomic
    if config.descriptor:  # two pieces of x a stage, by one thread, and none the old way
        assert code["UTMALDG"] >= 2 * (config.stages - 1) and code["LDGSTS"] == 0
    else:
        assert code["LDGSTS"] > 0 and code["UTMALDG"] == 0  # rows arrive while others are multiplied


def test_every_side_has_a_shipped_configuration():
    for name, chosen in CHOSEN.items():
        sides = [side for side, _ in chosen.by_side]
        assert sides == sorted(sides) and {config for _, config in chosen.by_side} <= set(SHIPPED[name])
    for arch, name in ((80, "sm_80"), (89, "sm_80"), (90, "sm_90"), (100, "sm_100"), (103, "sm_100"), (120, "sm_80")):
        assert family(torch.bfloat16, arch) == name and family(torch.float32, arch) == "fp32"
    whole, odd = torch.empty(8, 4096, dtype=torch.float16), torch.empty(8, 4097, dtype=torch.float16)
    assert describable(whole) and config_for(whole, 90).descriptor
    assert not describable(odd) and not config_for(odd, 90).descriptor and not config_for(whole, 80).descriptor
    assert config_for(odd, 90).group > 1 == config_for(whole[:, :512], 90).group


@pytest.mark.parametrize("case", SCALE)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scaling_does_not_spill_and_leaves_room_for_many_programs(arch, case, tmp_path):
    done = compile_one(arch, SCALE[case])
    assert len(done) == 4
    needs_disassembler()
    for compiled in done:
        registers, code = inspected(compiled.cubin, tmp_path)
        print(f"{compiled.name} {case} sm_{arch}: {registers} registers")
        assert code["STL"] == code["LDL"] == 0
        assert registers <= 128  # two programs of 8 warps: loads of one while the other divides


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
