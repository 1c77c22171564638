"""Choose values for the keys that are ``null``. The values that depend on a device's costs are
chosen in ``plan/plan.py`` instead."""

from collections.abc import Collection
from typing import Any

from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import METHODS
from ds_kfac.model.registry import MATRICES
from ds_kfac.schedule.timetable import Value

TYPES = list(MATRICES)
DENSE_MAX = 4096
REFRESH = 5
"""Number of factor updates between two refreshes."""
DAMPING = {"tikhonov": 1e-3, "relative": 1.0}
"""dict from ``damping.kind`` to the default of ``damping.value``."""
KL_CLIP = 1e-3
RULES_BLOCKS = ("damping", "preconditioner", "adam")
"""Blocks whose keys are read by update rules only. Each update rule reads some of them."""


def resolve(
    config: KFACConfig, *, fisher: str, blocks: Collection[str] = (), adaptive: bool = False
) -> tuple[KFACConfig, tuple[str, ...]]:
    """Replace every null that means "choose for me" by a value. Nulls whose values depend on costs
    stay; :func:`ds_kfac.plan.plan.make_plan` replaces them.

    Args:
        config: the parsed "kfac" block.
        fisher: value that the update rule chooses for ``factor.fisher``.
        blocks: the blocks of :data:`RULES_BLOCKS` that this update rule reads. Choices in the other
            blocks of :data:`RULES_BLOCKS` get no text.
        adaptive: whether the optimizer is adaptive, see :func:`adaptive`.

    Returns the new config, and a text for each choice: key, value, reason.
    """
    damping_kind = config.damping.kind
    corrects = adaptive and METHODS[config.preconditioner.method].rotates
    answers: tuple[tuple[str, str, Any, str], ...] = (
        ("factor", "fisher", fisher, "default for this optimizer"),
        ("factor", "dense_max", DENSE_MAX, "longer sides are cut into blocks"),
        (
            "eigenbasis",
            "refresh_interval",
            config.factor.update_interval.times(REFRESH),
            f"every {REFRESH} factor updates",
        ),
        (
            "damping",
            "value",
            Value.constant(DAMPING[damping_kind]),
            f"default for {damping_kind} damping",
        ),
        (
            "preconditioner",
            "eigenvalues",
            "corrected" if corrects else "kronecker",
            "default for this optimizer",
        ),
        ("preconditioner", "kl_clip", Value.constant(KL_CLIP), "as in KAISA"),
        ("layers", "types", TYPES, "set this key to add other types"),
    )
    reasons = []
    for block, key, value, why in answers:
        if getattr(getattr(config, block), key) is None:
            config = config.having(block, **{key: value})
            if block not in RULES_BLOCKS or block in blocks:
                shown = ", ".join(value) if isinstance(value, list) else value
                reasons.append(f"{block}.{key} {shown} ({why})")
    return config, tuple(reasons)


def adaptive(optimizer: str) -> bool:
    """Return whether an optimizer's steps do not depend on the size of its gradients, because it
    divides by a running second moment or takes the sign.

    Args:
        optimizer: its class name, or its type in a DeepSpeed config.
    """
    name = optimizer.lower()
    return any(word in name for word in ("adam", "lamb", "lion", "adagrad", "rmsprop", "adafactor"))
