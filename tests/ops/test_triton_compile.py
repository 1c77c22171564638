"""Every Triton kernel in its shipped configurations, compiled for devices that are not there.
Spills are errors."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.ops.triton_tools import Compiled, compiling, cuobjdump, usage

pytest.importorskip("triton", reason="triton is not installed: its kernels are not compiled")

from benchmarks.kernels.syrk_candidates import CANDIDATES
from ds_kfac.ops.functional import packed_numel
from ds_kfac.ops.triton import scale as scales
from ds_kfac.ops.triton import syrk
from ds_kfac.ops.triton.syrk import CHOSEN, SyrkConfig, config_for, family

ARCHITECTURES = (80, 90, 100)
SHARED_PER_MULTIPROCESSOR = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
REGISTERS = 65536


def scale(n: int, rows: int, columns: int, result: torch.dtype) -> None:
    several, vector = torch.empty(n, rows, columns), torch.empty(n)
    flags = torch.empty(n, dtype=torch.bool)
    out = torch.empty(several.shape, dtype=result)
    scales.adam_step_(*[several] * 4, vector, flags, betas=(0.9, 0.99), eps=1e-8)
    for size in (None, vector):
        scales.finish_direction_(out, several, vector, size, vector, vector, flags)


SCALE = {
    "wide": lambda: scale(1, 768, 769, torch.float32),
    "narrow": lambda: scale(2, 64, 3072, torch.bfloat16),
}


def compile_one(arch: int, launch: Callable[[], None]) -> list[Compiled]:
    with compiling(arch) as done:
        launch()
    assert done
    return done


def registers_of(compiled: Compiled, directory: Path) -> int:
    """A thread's; there is no local memory."""
    if cuobjdump() is None:
        pytest.skip("compiled without spills; cuobjdump is missing, so registers are not checked")
    registers, local = usage(compiled.cubin, directory)
    assert local == 0
    print(f"{compiled.name}: {registers} registers, {compiled.shared} bytes shared")
    return registers


def fits(config: SyrkConfig, compiled: Compiled, registers: int, arch: int) -> bool:
    """Whether a multiprocessor holds as many programs as the configuration says. A program has 1 KB
    more."""
    shared = config.resident * (compiled.shared + 1024) <= SHARED_PER_MULTIPROCESSOR[arch]
    return shared and config.resident * config.warps * 32 * -(-registers // 8) * 8 <= REGISTERS


def shipped() -> Iterator[tuple[int, str, SyrkConfig, int, bool]]:
    """(architecture, family, configuration, split, masked): all of them, in turn with and without
    atomic additions; those without a descriptor also with rows that do not count."""
    for arch, name in product(ARCHITECTURES, ("16 bits", "fp32")):
        family = name if name == "fp32" else f"sm_{arch}"
        plain = [config.plain() for _, config in CHOSEN[family].by_side]
        configs = dict.fromkeys((*CANDIDATES[family], *plain))
        for index, config in enumerate(configs):
            yield arch, family, config, 3 if index % 2 else 1, False
        for index, config in enumerate(dict.fromkeys(config.plain() for config in configs)):
            yield arch, family, config, 1 if index % 2 else 3, True


@pytest.mark.parametrize(("arch", "name", "config", "split", "masked"), shipped())
def test_syrk_does_not_spill_and_multiplies_on_tensor_cores(
    arch, name, config, split, masked, tmp_path, monkeypatch
):
    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    dtype = torch.float32 if name == "fp32" else (torch.bfloat16, torch.float16)[split == 1]
    x, total = torch.empty(2048, 1024, dtype=dtype), torch.empty(packed_numel(1025))
    scale = 1.0 if split == 1 else torch.ones(())
    kept = torch.ones(2048, dtype=torch.bool) if masked else None
    (compiled,) = compile_one(
        arch, lambda: syrk.accumulate(total, x, config, kept=kept, bias=True, scale=scale)
    )
    products = compiled.count(TENSOR_CORE[arch])  # 16 rows an instruction; fp32 rows elsewhere
    assert products >= config.chunk // 16 if dtype != torch.float32 else products == 0
    if arch == 90 and dtype != torch.float32:
        assert f"m64n{config.width}k16" in compiled.ptx  # one instruction for a tile's whole width
    atomic = compiled.count("red") + compiled.count("atom")  # triton 3.9, triton 3.6
    assert bool(atomic) == (split > 1)  # programs share tiles
    pieces = compiled.count("cp.async.bulk.tensor")
    copies = compiled.count("cp.async.cg") + compiled.count("cp.async.ca")
    if config.descriptor:  # two pieces of x a stage, by one thread, and none the old way
        assert pieces >= 2 * (config.stages - 1) and copies == 0
    else:
        assert copies > 0 and pieces == 0  # rows arrive while others are multiplied
    assert fits(config, compiled, registers_of(compiled, tmp_path), arch)


def test_every_side_has_a_configuration():
    for name, chosen in CHOSEN.items():
        sides = [side for side, _ in chosen.by_side]
        assert sides == sorted(sides), name
    known = {80: "sm_80", 89: "sm_80", 90: "sm_90", 100: "sm_100", 103: "sm_100", 120: "sm_80"}
    for arch, name in known.items():
        assert family(torch.bfloat16, arch) == name and family(torch.float32, arch) == "fp32"
    whole, odd = (torch.empty(8, side, dtype=torch.float16) for side in (4096, 4097))
    assert config_for(whole, 90).descriptor and not config_for(whole, 80).descriptor
    assert not config_for(odd, 90).descriptor
    assert config_for(odd, 90).group > 1 == config_for(whole[:, :512], 90).group


@pytest.mark.parametrize(
    ("arch", "case"), [(80, "wide"), (90, "wide"), (90, "narrow"), (100, "narrow")]
)
def test_scaling_does_not_spill_and_leaves_room_for_many_programs(arch, case, tmp_path):
    done = compile_one(arch, SCALE[case])
    assert len(done) == 3
    for compiled in done:  # two programs of 8 warps: loads of one while the other divides
        assert registers_of(compiled, tmp_path) <= 128
