"""The table of engine modes: exact class of ``engine.optimizer`` -> layout. An unknown wrapper raises."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.replicated import BF16, Replicated, ReplicatedHalf
from ds_kfac.zero.shards import Piece
from ds_kfac.zero.stage3 import Stage3
from ds_kfac.zero.stage_1_and_2 import Stage12

SHARD_LAYOUTS: dict[type, type[ShardLayout]] = {
    DeepSpeedZeroOptimizer: Stage12,
    DeepSpeedZeroOptimizer_Stage3: Stage3,
    BF16_Optimizer: BF16,
    FP16_Optimizer: ReplicatedHalf,
    FP16_UnfusedOptimizer: ReplicatedHalf,
}


def optimized_parameters(engine: Any) -> list[nn.Parameter]:
    """Every parameter the engine's optimizer steps; ZeRO's own param_groups hold flat slices instead."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(engine.optimizer, attribute, None)
        if groups is not None:
            return [param for group in groups for param in group]
    return [param for group in engine.optimizer.param_groups for param in group["params"]]


def shard_layout(
    engine: Any, params: Sequence[nn.Parameter], group: Any = None, pieces: Sequence[Piece] | None = None
) -> ShardLayout:
    """The layout of the engine's mode.

    Raises:
        ValueError: a wrapper that is not in the table; where it keeps gradients is not known, so nothing is guessed.
    """
    wrapper = type(engine.optimizer)
    layout = SHARD_LAYOUTS.get(wrapper)
    is_bare = isinstance(engine.optimizer, torch.optim.Optimizer) and not isinstance(
        engine.optimizer, DeepSpeedOptimizer
    )
    if layout is None and is_bare and not engine.zero_optimization():
        layout = Replicated
    if layout is None:
        raise ValueError(
            f"ds_kfac: DeepSpeed wrapped the optimizer in {wrapper.__module__}.{wrapper.__name__}, which ds_kfac does "
            f"not know; known: {', '.join(known.__name__ for known in SHARD_LAYOUTS)} and bare torch optimizers at "
            "ZeRO stage 0"
        )
    return layout(engine, params, group, pieces)
