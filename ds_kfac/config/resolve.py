"""What ``null`` means: values for keys that the user leaves to us. Those by a device's costs:
``plan/plan.py``."""

from collections.abc import Collection
from typing import Any

from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import METHODS
from ds_kfac.model.registry import MATRICES
from ds_kfac.schedule.timetable import Value

TYPES = list(MATRICES)
DENSE_MAX = 4096
REFRESH = 5
"""Factor updates between two refreshes."""
DAMPING = {"tikhonov": 1e-3, "relative": 1.0}
KL_CLIP = 1e-3


def resolve(
    config: KFACConfig, *, fisher: str, blocks: Collection[str] = (), adaptive: bool = False
) -> tuple[KFACConfig, tuple[str, ...]]:
    """The config of a run, in which every null that means "choose for me" has a value, but for
    those that depend on costs, see :func:`ds_kfac.plan.plan.make_plan`.

    Args:
        fisher: where the update rule takes G from.
        blocks: blocks that only update rules read, of which this rule reads these; others get no
            text.
        adaptive: see :func:`adaptive`.

    Returns the config, and a text for each choice: key, value, reason.
    """
    options = config.preconditioner
    kind = config.damping.kind
    corrects = adaptive and METHODS[options.method].rotates
    answers: tuple[tuple[str, str, Any, str], ...] = (
        ("factor", "fisher", fisher, "this optimizer's"),
        ("factor", "dense_max", DENSE_MAX, "longer sides in blocks"),
        (
            "eigenbasis",
            "refresh_interval",
            config.factor.update_interval.times(REFRESH),
            f"{REFRESH} factor updates",
        ),
        ("damping", "value", Value.constant(DAMPING[kind]), f"of {kind} damping"),
        (
            "preconditioner",
            "eigenvalues",
            "corrected" if corrects else "kronecker",
            "by the optimizer",
        ),
        ("preconditioner", "kl_clip", Value.constant(KL_CLIP), "KAISA's"),
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
    """Whether an optimizer, by its class name or type in a DeepSpeed config, divides by a running
    second moment, or takes the sign: it undoes the size of its gradients."""
    name = optimizer.lower()
    return any(word in name for word in ("adam", "lamb", "lion", "adagrad", "rmsprop", "adafactor"))
