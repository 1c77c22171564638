"""Models, strategies and wire formats that are measured, and kfac-pytorch's figures."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ds_kfac.plan import plan as planning
from examples.gpt import GPT, GPTConfig

UPDATE, REFRESH = 10, 100
"""Steps between factor updates and between refreshes."""
MODEL = GPTConfig(width=256, blocks=4, context=128)
TINY = GPTConfig(width=24, blocks=1, heads=2, context=16)

STRATEGIES: Mapping[str, tuple[int, float | None]] = {
    "MEM-OPT": (0, 0.0),
    "HYBRID": (0, 0.5),
    "COMM-OPT": (0, 1.0),
    "ZeRO-1": (1, None),
    "ZeRO-2": (2, None),
    "ZeRO-3": (3, None),
}
"""Name -> ZeRO stage, and e if a layer has world^e gradient workers; None: it always has one."""
WIRES = ("fp32", "bf16")
"""Formats in which batch sums, eigenvectors, gradients and results travel."""

KFAC_PYTORCH = {"COMM-OPT": (5.5, 110.5), "MEM-OPT": (17.8, 64.0)}
"""Strategy -> payload in a step and K-FAC state of a rank [MB] by kfac-pytorch.

Measured on ``MODEL`` with 4 ranks, factors every 10 and eigenbases every 100 steps. Its payload is
the size of the tensors in the collectives that a rank takes part in: factors are all-reduced, the
rest is broadcast.
"""
KFAC_PYTORCH_WORLD = 4
KFAC_PYTORCH_WORST = 4.0
"""Its slowest step divided by the median one."""


class GELUBlock(nn.Sequential):
    """The MLP that kfac-pytorch was measured with: factors of side 1024 in a model of width 256."""

    def __init__(self, width: int) -> None:
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        super().__init__(up, nn.GELU(), down)
        for layer in (up, down):
            nn.init.normal_(layer.weight, std=0.02)


def gelu_gpt(config: GPTConfig) -> GPT:
    """Return a GPT of 3.3 M parameters, at the sizes of ``MODEL``."""
    model = GPT(config)
    for block in model.blocks:
        block.mlp = GELUBlock(config.width)
    return model


@dataclass(frozen=True)
class Case:
    """One engine to measure.

    Attributes:
        strategy: of ``STRATEGIES``; None: no K-FAC.
        wire: of ``WIRES``.
        optimizer: KFACAdamW keeps G the identity; any other has A and G.
        refresh: steps between refreshes.
        staggers: whether refreshes are spread over steps.
    """

    strategy: str | None
    world: int
    wire: str = "fp32"
    optimizer: str = "AdamW"
    refresh: int = REFRESH
    staggers: bool = False

    @property
    def stage(self) -> int:
        return STRATEGIES[self.strategy][0] if self.strategy else 0

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """While an engine is made, choose what a plan otherwise chooses by itself."""
        found: dict[str, Any] = {"LONG_REFRESH": -1.0 if self.staggers else math.inf}
        if self.wire == "bf16":
            found["gradient_dtypes"] = lambda *stored: (torch.bfloat16, torch.bfloat16)
        with patch.multiple(planning, **found):
            yield

    def config(self, rows: int) -> dict[str, Any]:
        """Return the DeepSpeed config."""
        rate = 1e-3 if self.optimizer == "AdamW" else 4e-3
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": rows,
            "steps_per_print": 1_000_000_000,
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": self.optimizer, "params": {"lr": rate, "torch_adam": True}},
        }
        if self.strategy is None:
            return config
        kfac: dict[str, dict[str, Any]] = {
            "factor": {"update_interval": UPDATE},
            "eigenbasis": {"refresh_interval": self.refresh},
            "burn_in": {"steps": 0},
            "communication": {"dtype": self.wire},
        }
        if self.stage == 0:
            part = workers_of(self.strategy, self.world) / self.world
            kfac["assignment"] = {"gradient_worker_fraction": part}
        return {**config, "kfac": kfac}


def workers_of(strategy: str, world: int) -> int:
    """Return a layer's gradient workers: the divisor of ``world`` nearest to world^e."""
    power = STRATEGIES[strategy][1]
    wanted = 1.0 if power is None else world**power
    divisors = [count for count in range(1, world + 1) if world % count == 0]
    return min(divisors, key=lambda count: abs(math.log(count / wanted)))


def byte_cases(world: int) -> list[Case]:
    """Return all strategies that differ on so many ranks, in fp32 and bf16; and KFACAdamW."""
    names = [name for name in STRATEGIES if world >= 4 or name != "HYBRID"]
    if world == 1:
        return [Case(name, world) for name in names if name != "COMM-OPT"]
    cases = [Case(name, world, wire) for wire in WIRES for name in names]
    return cases + [Case(name, world, "bf16", "KFACAdamW") for name in names if name != "ZeRO-1"]


def time_cases(strategy: str, world: int, refresh: int) -> dict[str, Case]:
    """Return engines that do the same work on average, but for the one without K-FAC."""
    case = Case(strategy, world, refresh=refresh)
    return {
        "no K-FAC": Case(None, world),
        "all at once": case,
        "staggered": replace(case, staggers=True),
    }
