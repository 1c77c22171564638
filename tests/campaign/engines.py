"""Engines for the campaign: small, with K-FAC or without, and what can be asked of them
afterwards."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from tests.campaign.harness import NothingTried
from tests.deepspeed.modes import KFAC_ADAMW, Mode
from tests.deepspeed.runs import build, patched

LR = 0.02
# every step counts, every other one decomposes: a fault meets a capture and a refresh
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 2},
    "burn_in": {"steps": 0},
}


def mode_of(stage: int, optimizer: str, dtype="fp32", clip=0.5, **extra: Any) -> Mode:
    adam = optimizer == "KFACAdamW"
    return Mode(f"z{stage}", stage, dtype, clip=clip, adam=adam, orthogonal=adam, extra=extra)


def engine_of(mode: Mode, optimizer: str, *, plain=False, model=None, accumulation=1, **over: Any):
    """With K-FAC; ``plain``: DeepSpeed alone with the optimizer that comes nearest."""
    params = {"lr": LR, "momentum": 0.9}
    if optimizer in ("KFACAdamW", "AdamW"):
        params = dict(KFAC_ADAMW[mode.precision]["params"])
    kind = "AdamW" if plain and optimizer == "KFACAdamW" else optimizer
    kfac = {"enabled": False} if plain else {**KFAC, **over.pop("kfac", {})}
    over = {"optimizer": {"type": kind, "params": params}, **over, "kfac": kfac}
    with patched(mode):
        return build(mode, accumulation, model=model, **over)


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


def state_is_finite(engine) -> bool:
    """Whether the factors, eigenbases and moments of all ranks are finite. Collective."""
    seen, finite = 0, True
    for kfac in engine.kfac.job.preconditioners:
        for tensor in tensors([kfac.state, list(kfac.curvature.factors.values())]):
            seen += tensor.numel()
            finite = finite and bool(torch.isfinite(tensor).all())
    counts = torch.tensor([seen, int(not finite)])
    torch.distributed.all_reduce(counts)
    if not counts[0]:
        raise NothingTried("no rank has any state to look at")
    return not counts[1]


def is_finite(values: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values.values())


def anywhere(texts: list[str]) -> list[str]:
    """What any rank has. Collective."""
    found: list[list[str]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, texts)
    return [text for one in found for text in one]


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Warnings of ds_kfac that are logged meanwhile, but for the good news."""
    from ds_kfac.log import logger

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "ds_kfac" in record.getMessage())
    handler.addFilter(lambda record: "loaded K-FAC" not in record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("WARNING")
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
