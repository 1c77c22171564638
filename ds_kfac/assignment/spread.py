"""How work is spread: the refreshes of an interval over its steps, and the rows of a batch over the ranks. Pure.

A factor of side D is an average over many updates, of which each needs a few rows per column, whatever the number of
ranks. So what statistics cost a rank falls with the number of ranks: each captures, sums and sends its part only, as
many ranks as a factor needs, near its eigen worker, others at every update.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_kfac.assignment.costs import FactorSpec, Work
from ds_kfac.model.convolutions import phase

EVERYONE = -1
CAPTURE_TOLERANCE = 0.1
"""Accepted excess of a rank's captures at a step over their mean: they may give a little for an even refresh."""


def refresh_offsets(
    factors: Sequence[FactorSpec], eigen_workers: Mapping[str, int], work: Work, *, alone: bool = False
) -> tuple[Mapping[str, int], float]:
    """Factor key -> the step, modulo the refresh interval, at which it is refreshed; modulo the update interval, at
    which it is captured. And seconds of the slowest rank at the slowest step.

    Heaviest first, each to the step where the slowest rank suffers least. A step takes as long as its slowest rank, so
    work of one rank goes where another is as busy anyway, and else to the emptiest step. Ranks of a node that share
    ``node_cores`` cores also wait for each other. Captures of one step, D^2 each, are kept near their mean on every
    rank. If the refresh interval is no multiple of the update interval, the steps past the largest one stay empty.

    Args:
        eigen_workers: factor key -> rank.
        work: its costs, intervals and method count.
        alone: whether a factor is captured by its eigen worker (and a few ranks more), or by every rank.
    """
    costs, refresh, update = work.costs, work.refresh_interval, work.update_interval
    steps = refresh // update * update or refresh
    captures = min(update, steps)
    seconds = {factor.key: costs.decompose(factor.side, work.method) for factor in factors}
    squares = {factor.key: factor.side.dim**2 for factor in factors}
    who = {key: eigen_workers[key] if alone else EVERYONE for key in squares}
    everything = Counter[int]()
    for key, square in squares.items():
        everything[who[key]] += square
    most = max(everything.values(), default=0)
    limit = max(*squares.values(), (1 + CAPTURE_TOLERANCE) * most / captures, 0)
    captured = [Counter[int]() for _ in range(captures)]
    busy: list[dict[Any, float]] = [defaultdict(float) for _ in range(steps)]  # a rank, or a node's cores
    length = [0.0] * steps
    offsets = dict.fromkeys(squares, 0)
    for key in sorted(squares, key=lambda key: (-seconds[key], -squares[key])):
        rank, worst = eigen_workers[key], max(length)
        parts: dict[Any, float] = {rank: seconds[key]}
        if costs.node_cores:
            parts["node", rank // costs.node_size] = seconds[key] / costs.node_cores
        after_it = [now[who[key]] + squares[key] for now in captured]
        fewest = max(limit, min(after_it))

        def outcome(
            step: int, parts: Mapping[Any, float] = parts, worst: float = worst, after_it: list[int] = after_it
        ) -> tuple[float, ...]:
            # by differences, so that work comes out exactly equal on an idle step and after the slowest rank's own
            longer = max(0.0, *(more - (length[step] - busy[step][part]) for part, more in parts.items()))
            after = length[step] + longer
            return max(worst, after), longer, after, after_it[step % captures], step

        step = min((step for step in range(steps) if after_it[step % captures] <= fewest), key=outcome)
        captured[step % captures][who[key]] += squares[key]
        for part, more in parts.items():
            busy[step][part] += more
            length[step] = max(length[step], busy[step][part])
        offsets[key] = step
    return offsets, max(length)


ROWS_PER_COLUMN = 4
"""Rows of an update per column of a factor, where the config names no number."""


def rows_needed(factor: FactorSpec, rows: int | None) -> int:
    """Of one update. ``rows``: what the config asks for; None: in proportion to the widest block."""
    return rows or ROWS_PER_COLUMN * (factor.side.block if factor.side.block > 1 else factor.side.dim)


@dataclass(frozen=True)
class Contributors:
    """Pure, the same on every rank.

    Attributes:
        world: ranks.
        node_size: consecutive ranks of a node.
        counts: factor key -> how many at an update; those that are missing have all ranks.
    """

    world: int
    node_size: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)

    def of(self, key: str, owner: int, step: int) -> Sequence[int]:
        """Ranks that contribute to a factor at ``step``, ascending: those of the eigen worker's node first.

        Args:
            owner: its eigen worker.
        """
        count, everyone = self.counts.get(key, self.world), range(self.world)
        if count >= self.world:
            return everyone
        start = owner - owner % self.node_size
        node = range(start, min(start + self.node_size, self.world))
        found = [owner, *_turned([rank for rank in node if rank != owner], count - 1, owner, step)]
        if len(found) < count:
            others = [rank for rank in everyone if rank not in node]
            found += _turned(others, count - len(found), owner, step)
        return tuple(sorted(found))


def _turned(ranks: Sequence[int], count: int, owner: int, step: int) -> list[int]:
    """``count`` of them at most, from a place that visits all of them alike as steps go by, another one for every
    eigen worker."""
    if count >= len(ranks):
        return list(ranks)
    first = owner + phase(step, len(ranks))
    return [ranks[(first + place) % len(ranks)] for place in range(count)]


def counted(
    factors: Sequence[FactorSpec], rows: Mapping[str, float], world: int, *, wanted: int | None
) -> Mapping[str, int]:
    """Factor key -> ranks that have the rows of an update.

    Args:
        rows: factor key -> rows of a rank in a step; factors that are missing take all ranks.
        wanted: rows of an update, see :func:`rows_needed`.
    """
    counts = {}
    for factor in factors:
        here = rows.get(factor.key, 0.0)
        if here > 0:
            counts[factor.key] = max(1, min(world, int(-(-rows_needed(factor, wanted) // here))))
    return {key: count for key, count in counts.items() if count < world}
