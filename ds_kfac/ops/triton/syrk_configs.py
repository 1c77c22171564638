"""How a SYRK is cut up, per kind of device and side: every shipped configuration, and which of them is taken.

No configuration spills registers on its devices, with or without tensor descriptors; see the tests. Which is best is
what ``benchmarks/kernels --sweep syrk`` finds on a device; it prints ``CHOSEN`` to be pasted here.
"""

from dataclasses import dataclass, replace

import torch

from ds_kfac.ops.triton.base import INTERPRET


@dataclass(frozen=True)
class SyrkConfig:
    """How a triangle is cut into tiles.

    Attributes:
        block: rows of a tile, and columns of a square one.
        chunk: rows multiplied at once.
        resident: programs that a multiprocessor has registers and shared memory for.
        group: tile rows whose tiles are computed column by column, so that programs which run together share columns
            in L2; 1 goes row by row.
        columns: of a tile that is not square, twice as many as rows or half; 0: it is square.
        descriptor: rows arrive by tensor descriptors, from sm_90 on the tensor memory accelerator (TMA).
    """

    block: int
    chunk: int
    warps: int
    stages: int
    resident: int
    group: int = 1
    descriptor: bool = False
    columns: int = 0

    @property
    def width(self) -> int:
        return self.columns or self.block

    def plain(self) -> "SyrkConfig":
        """For rows that no descriptor can describe."""
        return replace(self, descriptor=False)


@dataclass(frozen=True)
class Chosen:
    """The configurations of a kind of device.

    Attributes:
        source: machine that was measured, or ``computed`` where none was.
        by_side: (largest side, configuration), in the order of sides; the last is for all larger ones.
    """

    source: str
    by_side: tuple[tuple[int, SyrkConfig], ...]

    def at(self, dim: int) -> SyrkConfig:
        return next((config for side, config in self.by_side if dim <= side), self.by_side[-1][1])


_SMALL = SyrkConfig(64, 64, 4, 4, 3, descriptor=True)
_LARGE = SyrkConfig(128, 64, 8, 3, 2, descriptor=True)
_GROUPED = replace(_LARGE, group=16)
_DEEP = SyrkConfig(128, 128, 8, 3, 1, group=16, descriptor=True)
_FEW_WARPS = SyrkConfig(128, 64, 4, 3, 2, group=16, descriptor=True)
_WIDE = SyrkConfig(128, 64, 8, 4, 1, group=8, descriptor=True, columns=256)
_TALL = SyrkConfig(256, 64, 8, 4, 1, group=8, descriptor=True, columns=128)
_OLD_SMALL, _OLD_LARGE = SyrkConfig(64, 64, 4, 4, 3), SyrkConfig(128, 32, 8, 4, 1)
_EXACT = SyrkConfig(64, 16, 4, 3, 4)
SHIPPED: dict[str, tuple[SyrkConfig, ...]] = {
    "sm_80": (_OLD_SMALL, _OLD_LARGE, replace(_OLD_LARGE, group=8)),
    "sm_90": (_SMALL, SyrkConfig(64, 128, 4, 3, 2, descriptor=True), _LARGE, _GROUPED, _DEEP, _FEW_WARPS, _WIDE, _TALL),
    "sm_100": (_SMALL, _LARGE, _GROUPED, _DEEP, _FEW_WARPS, _WIDE, _TALL),
    "fp32": (_EXACT, replace(_EXACT, group=16)),
}
"""By kind of device, for 16-bit rows; for fp32 rows on any, as no tensor core multiplies in fp32."""
INTERPRETED = SyrkConfig(32, 16, 4, 1, 1, group=2, descriptor=True)
LARGEST = 1 << 20
CHOSEN: dict[str, Chosen] = {
    "sm_80": Chosen("computed", ((512, _OLD_SMALL), (LARGEST, _OLD_LARGE))),
    "sm_90": Chosen("computed", ((512, _SMALL), (4096, _LARGE), (LARGEST, _GROUPED))),
    "sm_100": Chosen("computed", ((512, _SMALL), (4096, _LARGE), (LARGEST, _GROUPED))),
    "fp32": Chosen("computed", ((LARGEST, _EXACT),)),
}


def family(dtype: torch.dtype, arch: int) -> str:
    """Key of the tables. Consumer Blackwell (sm_120) has the tensor cores of sm_80, and little shared memory."""
    if dtype == torch.float32:
        return "fp32"
    return {9: "sm_90", 10: "sm_100"}.get(arch // 10, "sm_80")


def describable(x_ND: torch.Tensor) -> bool:
    """Whether a descriptor can hold these rows: aligned to 16 bytes, each of them, columns in one piece."""
    aligned = x_ND.data_ptr() % 16 == 0 and x_ND.stride(0) * x_ND.element_size() % 16 == 0
    return aligned and x_ND.stride(1) == 1 and x_ND.stride(0) >= x_ND.shape[1] and max(x_ND.shape) < 1 << 31


def config_for(x_ND: torch.Tensor, arch: int) -> SyrkConfig:
    """What rows are multiplied with."""
    config = INTERPRETED if INTERPRET else CHOSEN[family(x_ND.dtype, arch)].at(x_ND.shape[1])
    return config if describable(x_ND) else config.plain()
