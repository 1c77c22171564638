"""By what a loss is divided, read from its graph: by the labels of a whole step, or by its micro-batches."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from math import isclose, prod
from typing import Any

from torch import Tensor

from ds_kfac.model.graph import number, under


def divisors(node: Any) -> tuple[list[float | None], bool]:
    """By what a scalar is divided on its way from scalars, the last first, None for what is on a GPU or no number; and
    whether it is seen to be a mean."""
    found, mean = list[float | None](), False
    for each in under(node, lambda _, shape: prod(shape) == 1):
        name, other = each.name(), None
        mean |= name.startswith("MeanBackward") or getattr(each, "_saved_reduction", 0) == 1
        if name.startswith(("DivBackward", "MulBackward")):
            with suppress(RuntimeError):  # it was changed in place
                other = getattr(each, "_saved_other", None)
                other = getattr(each, "_saved_self", None) if other is None and name[0] == "M" else other
        if other is not None and isinstance(other, Tensor) and (not other.is_cpu or other.numel() != 1):
            found.append(None)
        elif other is not None and (by := number(other)):
            found.append(by if name[0] == "D" else 1 / by)
    return found, mean


def whole(found: Collection[float | None]) -> list[int]:
    """Those of :func:`divisors` that may be a number of micro-batches."""
    return [round(by) for by in found if by is not None and by > 1.5 and isclose(by, round(by), rel_tol=1e-6)]


def parts_of(backwards: Sequence[tuple[int, Collection[int]]]) -> int:
    """By how many micro-batches a caller who ends steps himself has divided each loss; 1: by none. ``backwards``: of
    each in a step, by how many its loss is known to be divided, and what else it is divided by (:func:`whole`)."""
    known, many = {by for by, _ in backwards}, len(backwards)
    times = many // max(known, default=1)
    fits = len(known) == 1 and times * max(known) == many and all(times in by for _, by in backwards)
    return times if fits else 1


def divided_by(node: Any, number: Any) -> bool:
    """Whether a scalar is divided by ``number``, of which on a GPU nothing is read; taken to be, where it is not seen
    to be a mean."""
    found, mean = divisors(node)
    if isinstance(number, Tensor) and (not number.is_cpu or number.numel() != 1):
        return None in found or not mean
    return any(by is None or isclose(by, number, rel_tol=1e-6) for by in found) or not mean


def micro_batches(node: Any, most: int) -> float:
    """By how many micro-batches, at most so many, a loss is divided; by all, where it is not seen to be a mean."""
    found, mean = divisors(node)
    counts = [by for by in whole(found) if by <= most]
    return most if most in counts or not (counts or mean) else next(iter(counts), 1)
