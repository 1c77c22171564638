"""What is chosen inside, by no key of the config. Functions, so that a test can have it otherwise."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ds_kfac.assignment.cost_model import CostModel
from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.model.layers.base import LayerSpec

EXACT_EVERY = 4
"""Where QR steps pay. What is left of an exact basis is a matter of how much A has changed in as many refreshes."""
WORTH = 0.5
"""Part of the exact refreshes' seconds that all may take for QR steps to be taken."""
LONG_STEP = 0.05
"""Seconds of decompositions in a step from which on they are done beside the steps that follow."""


def exact_every(costs: CostModel, factors: Sequence[FactorSpec], method: str) -> int:
    """Of so many refreshes of a factor one is exact, the others are QR steps: where these are predicted to save half of
    a time that matters, which they do on a GPU, not on a CPU. No GPU has run them yet."""
    exact, mixed = (sum(costs.refresh(f.side, method, exact_every=n) for f in factors) for n in (1, EXACT_EVERY))
    return EXACT_EVERY if exact > LONG_STEP and mixed < WORTH * exact else 1


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


def clip_lr(scheduled: bool) -> str:
    """Which learning rate counts in kl-clip's bound: with the "current" one, nu * lr does not depend on it, which would
    undo a schedule; with the "peak", the schedule's largest, or the largest one seen, the step shrinks with it.

    Args:
        scheduled: whether DeepSpeed runs an lr scheduler.
    """
    return "peak" if scheduled else "current"
