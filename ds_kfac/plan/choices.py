"""What is chosen inside, by no key of the config. Functions, so that a test can have it otherwise."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ds_kfac.assignment.costs import CostModel
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.model.layers import LayerSpec

BUCKET_BYTES = 1 << 28
"""Most bytes of batch sums that a rank sends, or receives, in one message; two are on their way at a time."""
LONG_REFRESH = 0.05
"""Seconds of a refresh of everything at once from which on it is spread over steps."""
LONG_STEP = 0.05
"""Seconds of decompositions in a step from which on they are done beside the steps that follow."""


def lag(costs: CostModel, worst: float, update: int, refresh: int) -> int:
    """Steps after which a refresh takes effect, where the config leaves it open.

    Args:
        worst: seconds of the decompositions in the step that has most.
        update, refresh: intervals.
    """
    return min(update, refresh - 1) if costs.beside and worst > LONG_STEP else 0


def stacks(device: torch.device, method: str) -> bool:
    """Whether small layers of equal shape are preconditioned together: fewer and larger launches, for a second copy of
    their eigenvectors, at most 256 MiB a rank, which memory plans do not count. On a CPU a batched product is slower
    than its parts; only layers whose gradients are rotated are stacked."""
    return FACTOR_FORMS[method].rotates and device.type != "cpu"


def common_inputs(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """With one A for the experts of a stack that have an A each."""
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        stacks.setdefault(layer.weight, []).append(layer)
    apart = {name: stack[0].name for name, stack in stacks.items() if not any(layer.shares for layer in stack)}
    return tuple(
        replace(layer, shares=apart[layer.weight]) if layer.name != apart.get(layer.weight, layer.name) else layer
        for layer in layers
    )


def gradient_dtypes(parameters: torch.dtype, gradients: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """In which gradients travel to their workers, as they are stored, and preconditioned ones back: in bf16 if the
    model is in 16 bits (fp16 would overflow, because they carry the loss scale)."""
    return gradients, torch.float32 if parameters is torch.float32 else torch.bfloat16


def clip_lr(scheduled: bool) -> str:
    """Which learning rate counts in kl-clip's bound: with the "current" one, nu * lr does not depend on it, which would
    undo a schedule; with the "peak", the schedule's largest, or the largest one seen, the step shrinks with it.

    Args:
        scheduled: whether DeepSpeed runs an lr scheduler.
    """
    return "peak" if scheduled else "current"
