"""Configurations of the Triton SYRK: those in use, and more for devices that were not measured."""

from dataclasses import replace

from ds_kfac.ops.triton.syrk import CHOSEN, SyrkConfig

_DEEP = SyrkConfig(128, 128, 8, 3, 1, group=16, descriptor=True)
_FEW_WARPS = SyrkConfig(128, 64, 4, 3, 2, group=16, descriptor=True)
_WIDE = SyrkConfig(128, 64, 8, 4, 1, group=8, descriptor=True, columns=256)
_TALL = SyrkConfig(256, 64, 8, 4, 1, group=8, descriptor=True, columns=128)
MORE: dict[str, tuple[SyrkConfig, ...]] = {
    "sm_80": (replace(CHOSEN["sm_80"].by_side[-1][1], group=8),),
    "sm_100": (_DEEP, _FEW_WARPS, _WIDE, _TALL),
    "fp32": (replace(CHOSEN["fp32"].by_side[-1][1], group=16),),
}
CANDIDATES = {
    name: tuple(dict.fromkeys((*(config for _, config in chosen.by_side), *MORE.get(name, ()))))
    for name, chosen in CHOSEN.items()
}
"""Kind of device, as in ``CHOSEN`` -> configurations."""
