"""Small engines with K-FAC, and DeepSpeed alone with the optimizer that comes nearest."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ds_kfac.step import proving
from tests.deepspeed.modes import KFAC_ADAMW, LR, Mode
from tests.deepspeed.runs import build, patched
from tests.ranks import of_ranks

# every step counts, every other one decomposes: a fault meets a capture and a refresh
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 2},
    "burn_in": {"steps": 0},
}


def mode_of(stage: int, optimizer: str, dtype: str = "fp32", clip: float = 0.5, **more) -> Mode:
    params = {"lr": LR, "momentum": 0.9} if optimizer == "SGD" else KFAC_ADAMW[dtype]["params"]
    inner = {"type": optimizer, "params": params}
    return Mode(f"z{stage}", stage, dtype, clip=clip, inner=inner, kfac=KFAC, **more)


def engine_of(mode: Mode, *, plain: bool = False, accumulation: int = 1, model=None, kfac=KFAC):
    proving.RAISES = False  # as for users
    inner = mode.inner
    if plain and inner["type"] == "KFACAdamW":
        inner = {**inner, "type": "AdamW"}
    block = {"enabled": False} if plain else kfac
    with patched(mode):
        return build(mode, accumulation, model=model, optimizer=inner, kfac=block)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in dataclasses, sequences and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, dict) else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in fields(value)]
    elif not isinstance(value, (list, tuple, dict)):
        return
    for part in parts:
        yield from tensors(part)


def is_finite(values: Any) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in tensors(values))


def state_is_finite(engine) -> bool:
    """Whether the factors, eigenbases and moments of all ranks are finite. Collective."""
    states = [
        [kfac.state, list(kfac.curvature.factors.values())]
        for kfac in engine.kfac.job.preconditioners
    ]
    seen = any(tensor.numel() for tensor in tensors(states))
    assert any(of_ranks(seen)), "no rank has any state to look at"
    return all(of_ranks(is_finite(states)))
