"""When within the interval each factor is refreshed, so that no step does more than its share. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac.costs import CostModel
from ds_kfac.factor_spec import FactorSpec

CAPTURE_TOLERANCE = 0.1
"""Accepted excess of the captures due at a step over their mean: they may give a little for an even refresh."""


@dataclass(frozen=True)
class Stagger:
    """Offsets, and the decompositions they predict.

    Attributes:
        offsets: factor key -> the step, modulo the refresh interval, at which it is refreshed; modulo the update
            interval, at which it is captured.
        worst: seconds of the slowest rank at the slowest step.
        mean: seconds of the slowest rank at a step, averaged over the interval.
    """

    offsets: Mapping[str, int]
    worst: float
    mean: float


def refresh_offsets(
    factors: Sequence[FactorSpec],
    decomposers: Mapping[str, int],
    costs: CostModel,
    *,
    update_interval: int,
    refresh_interval: int,
    together: Sequence[Sequence[str]] = (),
) -> Stagger:
    """Heaviest first, each to the step where the slowest rank suffers least.

    A step takes as long as its slowest rank, so work of one rank goes where another is as busy anyway, and else to the
    emptiest step. Every rank captures every factor: those of one step, D^2 each, are kept near their mean.

    Args:
        decomposers: factor key -> rank.
        refresh_interval: if it is no multiple of ``update_interval``, the steps past the largest one stay empty.
        together: keys of factors that need the same offset, those of a tied layer.
    """
    steps = refresh_interval // update_interval * update_interval or refresh_interval
    captures = min(update_interval, steps)
    items = _items(factors, together)
    seconds = {factor.key: costs.decompose(factor.side) for factor in factors}
    squares = [sum(factor.side.dim**2 for factor in item) for item in items]
    limit = max(max(squares, default=0), (1 + CAPTURE_TOLERANCE) * sum(squares) / captures)
    captured = [0] * captures
    busy: list[dict[int, float]] = [{} for _ in range(steps)]
    slowest = [0.0] * steps
    offsets: dict[str, int] = {}

    heaviest = sorted(range(len(items)), key=lambda i: (-sum(seconds[f.key] for f in items[i]), -squares[i]))
    for i in heaviest:
        work: dict[int, float] = {}
        for factor in items[i]:
            rank = decomposers[factor.key]
            work[rank] = work.get(rank, 0.0) + seconds[factor.key]
        open_ = [phase for phase in range(captures) if captured[phase] + squares[i] <= limit]
        least = min(captured)
        phases = set(open_ or [phase for phase in range(captures) if captured[phase] == least])
        worst = max(slowest)

        def outcome(step: int, work: Mapping[int, float] = work, worst: float = worst) -> tuple[float, ...]:
            # by differences, so that work comes out exactly equal on an idle step and after the slowest rank's own
            longer = max(0.0, *(more - (slowest[step] - busy[step].get(rank, 0.0)) for rank, more in work.items()))
            after = slowest[step] + longer
            return max(worst, after), longer, after, captured[step % captures], step

        step = min((step for step in range(steps) if step % captures in phases), key=outcome)
        captured[step % captures] += squares[i]
        for rank, more in work.items():
            busy[step][rank] = busy[step].get(rank, 0.0) + more
            slowest[step] = max(slowest[step], busy[step][rank])
        for factor in items[i]:
            offsets[factor.key] = step
    return Stagger(
        {factor.key: offsets[factor.key] for factor in factors}, max(slowest), sum(slowest) / refresh_interval
    )


def _items(factors: Sequence[FactorSpec], together: Sequence[Sequence[str]]) -> list[list[FactorSpec]]:
    first = {key: keys[0] for keys in together for key in keys}
    items: dict[str, list[FactorSpec]] = {}
    for factor in factors:
        items.setdefault(first.get(factor.key, factor.key), []).append(factor)
    return list(items.values())
