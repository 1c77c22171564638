"""What is chosen: nulls of the config that other keys or the update rule answer, each with its reason; and what
no key says, constants and functions, so that a test can have it otherwise."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_kfac.assignment.costs import CostModel
from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import MATRICES
from ds_kfac.schedule.intervals import Value

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


TYPES = list(MATRICES)
DENSE_MAX = 4096
REFRESH = 5
"""Factor updates to a refresh."""
DAMPING = {"tikhonov": 1e-3, "relative": 1.0, "adaptive": 100.0}
KL_CLIP = 1e-3


def resolve(
    config: KFACConfig, *, fisher: str, blocks: Collection[str] = (), adaptive: bool = False
) -> tuple[KFACConfig, tuple[str, ...]]:
    """The config of a run, in which no null means "choose for me", but for those that only a plan can answer: it needs
    the costs for them, see :func:`ds_kfac.plan.make_plan.make_plan`.

    Args:
        fisher: where the update rule takes G from.
        blocks: those of the config that only this update rule reads; of others no reason is given.
        adaptive: whether the optimizer divides by a running second moment, see :func:`adaptive`.

    Returns the config, and a text for each choice: key, value, reason.
    """
    options = config.preconditioner
    graft, step = options.graft, options.step
    corrects = adaptive and step == "fixed" and FACTOR_FORMS[options.method].rotates
    kind = config.damping.kind or ("adaptive" if step == "quadratic" else "relative")
    kl_clip = 0.0 if graft == "norm" or step == "quadratic" else KL_CLIP
    answers: tuple[tuple[str, str, Any, str], ...] = (
        ("factor", "fisher", fisher, "this optimizer's"),
        ("factor", "dense_max", DENSE_MAX, "longer sides in blocks"),
        ("eigenbasis", "refresh_interval", config.factor.update_interval.times(REFRESH), f"{REFRESH} factor updates"),
        ("damping", "kind", kind, f"step {step}"),
        ("damping", "value", Value.constant(DAMPING[kind]), f"of {kind} damping"),
        ("preconditioner", "eigenvalues", "corrected" if corrects else "kronecker", "by the optimizer"),
        ("preconditioner", "kl_clip", Value.constant(kl_clip), f"graft {graft}, step {step}"),
        ("layers", "types", TYPES, "others are asked for by name"),
    )
    reasons = []
    for block, key, value, why in answers:
        if getattr(getattr(config, block), key) is None:
            config = config.having(block, **{key: value})
            if block not in ("damping", "preconditioner", "adam") or block in blocks:
                shown = ", ".join(value) if isinstance(value, list) else value
                reasons.append(f"{block}.{key} {shown} ({why})")
    return config, tuple(reasons)


def adaptive(optimizer: str) -> bool:
    """Whether an optimizer of this class name, or type in a DeepSpeed config, divides by a running second moment (or
    takes the sign): it undoes the size of what it is given."""
    name = optimizer.lower()
    return any(word in name for word in ("adam", "lamb", "lion", "adagrad", "rmsprop", "adafactor"))
