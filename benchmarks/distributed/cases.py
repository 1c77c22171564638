"""What the distributed benchmark measures: models, strategies, wire formats; and the figures it is
held against."""

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
"""Stage, and the power of the world that is the number of gradient workers; None where there is
always one."""

WIRES = ("fp32", "bf16")
"""In which everything travels: batch sums, eigenvectors, gradients and results."""

KFAC_PYTORCH = {"COMM-OPT": (5.5, 110.5), "MEM-OPT": (17.8, 64.0)}
"""Strategy -> payload per step [MB], amortised 10/100, and state per rank [MB]; on this model, on 4
ranks. Its payload is the size of the tensors in the collectives that a rank takes part in: factors
are all-reduced, the rest broadcast."""

PAYLOAD_TARGETS = {"COMM-OPT": 1.2, "MEM-OPT": 7.5, "ZeRO-1": 2.5, "ZeRO-2": 2.5}
"""[MB] per rank and step on 4 ranks with 16 bits on the wire. ZeRO-3's is of the gradient, see the
report."""
MEMORY_TARGETS = dict.fromkeys(("MEM-OPT", "ZeRO-1", "ZeRO-2", "ZeRO-3"), 20.0)
WORST_TARGET, KFAC_PYTORCH_WORST = 1.5, 4.0
"""Worst step to the median one."""


class GELUBlock(nn.Sequential):
    """The MLP that kfac-pytorch was measured with: factors of width 1024 in a model of width
    256."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        for index in (0, 2):
            nn.init.normal_(self[index].weight, std=0.02)


def gelu_gpt(config: GPTConfig) -> GPT:
    """3.3 M parameters at the sizes of ``MODEL``."""
    model = GPT(config)
    for block in model.blocks:
        block.mlp = GELUBlock(config.width)
    return model


MODELS = {"gelu": gelu_gpt, "swiglu": GPT}
"""swiglu: as in the examples; gate and up share their input."""


@dataclass(frozen=True)
class Case:
    """One engine to measure.

    Attributes:
        strategy: of ``STRATEGIES``; None: no K-FAC.
        wire: of ``WIRES``.
        optimizer: KFACAdamW keeps G the identity; with any other there are A and G.
        block: more of the "kfac" block, by its own blocks' names.
        staggers: whether refreshes are spread over steps.
    """

    strategy: str | None
    world: int
    wire: str = "fp32"
    optimizer: str = "AdamW"
    model: str = "gelu"
    block: Mapping[str, Mapping[str, Any]] | None = None
    staggers: bool = False

    def with_options(self, **block: Mapping[str, Any]) -> "Case":
        return replace(self, block={**(self.block or {}), **block})

    @property
    def stage(self) -> int:
        return STRATEGIES[self.strategy][0] if self.strategy else 0

    @property
    def workers(self) -> int:
        """Gradient workers of a layer."""
        assert self.strategy is not None
        return workers_of(self.strategy, self.world)

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.world} ranks, {self.wire}, {self.optimizer}, {self.model}"

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """What a plan chooses by itself is the case's while an engine is made."""
        found: dict[str, Any] = {"LONG_REFRESH": -1.0 if self.staggers else math.inf}
        if self.wire == "bf16":
            found["gradient_dtypes"] = lambda *stored: (torch.bfloat16, torch.bfloat16)
        with patch.multiple(planning, **found):
            yield

    def config(self, rows: int) -> dict[str, Any]:
        """For DeepSpeed."""
        rate = 1e-3 if self.optimizer == "AdamW" else 4e-3
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": rows,
            "steps_per_print": 1_000_000_000,
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": self.optimizer, "params": {"lr": rate, "torch_adam": True}},
        }
        if self.strategy is None:
            return config
        block: dict[str, dict[str, Any]] = {
            "factor": {"update_interval": UPDATE},
            "eigenbasis": {"refresh_interval": REFRESH},
            "burn_in": {"steps": 0},
            "communication": {"dtype": self.wire},
        }
        if self.stage == 0:
            block["assignment"] = {"gradient_worker_fraction": self.workers / self.world}
        for name, values in (self.block or {}).items():
            block[name] = {**block.get(name, {}), **values}
        return {**config, "kfac": block}


def workers_of(strategy: str, world: int) -> int:
    """Gradient workers of a layer: of the hybrid the divisor of ``world`` that is nearest to its
    root."""
    power = STRATEGIES[strategy][1]
    wanted = 1.0 if power is None else world**power
    divisors = [count for count in range(1, world + 1) if world % count == 0]
    return min(divisors, key=lambda count: abs(math.log(count / wanted)))


def byte_cases(world: int) -> list[Case]:
    """All strategies that differ on so many ranks, fp32 and bf16; and KFACAdamW."""
    names = [name for name in STRATEGIES if world >= 4 or name != "HYBRID"]
    if world == 1:
        return [Case(name, world) for name in names if name != "COMM-OPT"]
    cases = [Case(name, world, wire) for wire in ("fp32", "bf16") for name in names]
    return cases + [Case(name, world, "bf16", "KFACAdamW") for name in names if name != "ZeRO-1"]
