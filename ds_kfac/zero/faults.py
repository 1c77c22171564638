"""Known faults of DeepSpeed's engine modes. K-FAC cannot fix them, so the attach report lists
them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.layout import Half, Replicated, ShardLayout
from ds_kfac.zero.stages import BF16, Stage3, Stage12, ZeroLayout


@dataclass(frozen=True)
class Fault:
    """A fault that all DeepSpeed versions have.

    Attributes:
        mode: class of the layouts that may have the fault.
        applies: function that returns whether a layout has the fault.
        text: format string that describes the fault, with the field ``layout``. In the description,
            "it" is DeepSpeed.
    """

    mode: type
    applies: Callable[[Any], bool]
    text: str


def has_sparse_modules(engine: Any) -> bool:
    return any(getattr(module, "sparse", None) is True for module in engine.module.modules())


def schedules_a_replaced_adagrad(engine: Any) -> bool:
    """Return whether the user's scheduler changes the learning rate of an Adagrad object that is
    not used any more, because ZeRO has replaced it by its own Adagrad."""
    inner = engine.basic_optimizer
    scheduled = getattr(engine.lr_scheduler, "optimizer", None)
    return isinstance(inner, torch.optim.Adagrad) and scheduled is inner


FAULTS = (
    Fault(
        ShardLayout,
        lambda layout: layout.divisor != layout.averaged_over,
        "it sums gradients over the {layout.engine.sequence_parallel_size} ranks of a sequence "
        "instead of averaging them. This is right for a loss that is a mean over the whole "
        "sequence. For a mean over a rank's own tokens, gradients are too large by a factor of "
        "{layout.engine.sequence_parallel_size}",
    ),
    Fault(
        Replicated,
        lambda layout: layout.engine.pipeline_parallelism and layout.engine.gradient_clipping(),
        "at stage 0 it clips every pipeline stage by the norm of the first stage's gradients only",
    ),
    Fault(
        Replicated,
        lambda layout: layout.engine.gradient_clipping() and has_sparse_modules(layout.engine),
        "it does not clip sparse gradients, such as those of nn.Embedding(sparse=True)",
    ),
    Fault(
        Half,
        lambda layout: deepspeed_versions.lacks_loss_scale(layout.optimizer),
        "at stage 0 in fp16 it divides gradients by a loss scale, but never multiplies the loss by "
        "this scale (deepspeed PR 8393). So SGD's steps, and the norm by which it clips, are too "
        "small by this factor",
    ),
    Fault(
        ZeroLayout,
        lambda layout: schedules_a_replaced_adagrad(layout.engine),
        "it replaces your Adagrad by its own, whose learning rate your scheduler does not change. "
        "Name a scheduler in the config, or use ZeRO stage 0 or another optimizer",
    ),
    Fault(
        ZeroLayout,
        lambda layout: deepspeed_versions.has_dynamic_scale(layout.optimizer),
        "in a step in which the loss scale grows, it divides gradients by the new scale. So these "
        "gradients are half as large as they should be, unless they are clipped",
    ),
    Fault(
        ZeroLayout,
        lambda layout: layout.grad_scaler and len(layout.groups) > 1,
        "with torch_autocast fp16, in a step in which the GradScaler's scale grows, it divides all "
        "parameter groups but the first by the new scale. So the gradients of these groups are "
        "half as large as they should be",
    ),
    Fault(
        ZeroLayout,
        lambda layout: layout.grad_scaler and layout.optimizer.clip_grad > 0,
        "with torch_autocast fp16 it clips gradients before it divides them by the GradScaler's "
        "scale",
    ),
    Fault(
        Stage12,
        lambda layout: (
            layout.optimizer.round_robin_gradients
            and not deepspeed_versions.is_aligned(layout.optimizer)
        ),
        "with round_robin_gradients, safe_get_full_* and universal checkpoints read the wrong "
        "parameters",
    ),
    Fault(
        Stage12,
        lambda layout: deepspeed_versions.applies_nonfinite(layout.optimizer),
        "in bf16 it applies gradients that are not finite, unless bf16.check_grad_overflow is set",
    ),
    Fault(
        Stage3,
        lambda layout: not layout.offloads,
        "if a parameter outside of K-FAC layers gets no gradient in a step, DeepSpeed updates it "
        "with the last gradient again",
    ),
)


def _stage_1_2(layout: Any) -> tuple[str, ...]:
    micro_batches = layout.engine.gradient_accumulation_steps()
    found: tuple[str, ...] = ()
    if layout.averaged_over > 1:
        found += deepspeed_versions.reduction_faults(layout.optimizer)
    if layout.offloads:
        found += deepspeed_versions.offload_faults(micro_batches)
    else:
        found += deepspeed_versions.accumulation_faults(layout.optimizer, micro_batches)
    return found


def _pipeline(layout: Any) -> tuple[str, ...]:
    if not layout.engine.pipeline_parallelism:
        return ()
    return deepspeed_versions.pipeline_faults(layout.engine.gradient_accumulation_steps())


OF_VERSIONS: tuple[tuple[type, Callable[[Any], tuple[str, ...]]], ...] = (
    (ShardLayout, _pipeline),
    (BF16, lambda layout: deepspeed_versions.bf16_optimizer_faults()),
    (Stage12, _stage_1_2),
    (
        Stage3,
        lambda layout: deepspeed_versions.gather_faults(
            torch.distributed.get_backend(layout.group)
        ),
    ),
)
"""Faults of some DeepSpeed versions. Each entry is a pair: a class of layouts, and a function that
describes the faults of such a layout."""


def faults(layout: ShardLayout) -> Sequence[str]:
    """Return descriptions of DeepSpeed's faults in an engine's mode. In these texts, "it" is
    DeepSpeed."""
    found = [
        fault.text.format(layout=layout)
        for fault in FAULTS
        if isinstance(layout, fault.mode) and fault.applies(layout)
    ]
    for mode, texts in OF_VERSIONS:
        if isinstance(layout, mode):
            found += texts(layout)
    return found
