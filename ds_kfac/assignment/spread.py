"""How work is spread: the refreshes of an interval over its steps, and the rows of a batch over the ranks. Pure.

A factor of side D is an average over many updates, of which each needs a few rows per column, whatever the number of
ranks. So what statistics cost a rank falls with the number of ranks: each captures, sums and sends its part only, as
many ranks as a factor needs, near its eigen worker, others at every update.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_kfac.assignment.costs import CostModel, FactorSpec
from ds_kfac.curvature.methods import EIGEN, Method
from ds_kfac.model.convolutions import phase

CAPTURE_TOLERANCE = 0.1
"""Accepted excess of a rank's captures at a step over their mean: they may give a little for an even refresh."""


EVERYONE = -1


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
    eigen_workers: Mapping[str, int],
    costs: CostModel,
    *,
    update_interval: int,
    refresh_interval: int,
    method: Method = EIGEN,
    alone: bool = False,
) -> Stagger:
    """Heaviest first, each to the step where the slowest rank suffers least.

    A step takes as long as its slowest rank, so work of one rank goes where another is as busy anyway, and else to the
    emptiest step. Ranks of a node that share ``node_cores`` cores also have to wait for each other.
    Captures of one step, D^2 each, are kept near their mean on every rank.

    Args:
        eigen_workers: factor key -> rank.
        refresh_interval: if it is no multiple of ``update_interval``, the steps past the largest one stay empty.
        method: what a refresh is.
        alone: whether a factor is captured by its eigen worker (and a few ranks more), or by every rank.
    """
    steps = refresh_interval // update_interval * update_interval or refresh_interval
    captures = min(update_interval, steps)
    seconds = {factor.key: costs.decompose(factor.side, method) for factor in factors}
    squares = [Counter({eigen_workers[factor.key] if alone else EVERYONE: factor.side.dim**2}) for factor in factors]
    everything = sum(squares, Counter[int]())
    largest = max((max(own.values()) for own in squares), default=0)
    limit = max(largest, (1 + CAPTURE_TOLERANCE) * max(everything.values(), default=0) / captures)
    captured = [Counter[int]() for _ in range(captures)]
    loads = [_Load(costs.node_size, costs.node_cores) for _ in range(steps)]
    offsets: dict[str, int] = {}

    heaviest = sorted(range(len(factors)), key=lambda i: (-seconds[factors[i].key], -squares[i].total()))
    for i in heaviest:
        key = factors[i].key
        work = {eigen_workers[key]: seconds[key]}
        after_it = [max(now[rank] + more for rank, more in squares[i].items()) for now in captured]
        open_ = [phase for phase in range(captures) if after_it[phase] <= limit]
        phases = set(open_ or [phase for phase in range(captures) if after_it[phase] == min(after_it)])
        worst = max(load.seconds for load in loads)

        def outcome(
            step: int, work: Mapping[int, float] = work, worst: float = worst, after_it: list[int] = after_it
        ) -> tuple[float, ...]:
            longer = loads[step].longer(work)
            after = loads[step].seconds + longer
            return max(worst, after), longer, after, after_it[step % captures], step

        step = min((step for step in range(steps) if step % captures in phases), key=outcome)
        captured[step % captures].update(squares[i])
        loads[step].add(work)
        offsets[key] = step
    seconds_of = [load.seconds for load in loads]
    return Stagger(
        {factor.key: offsets[factor.key] for factor in factors}, max(seconds_of), sum(seconds_of) / refresh_interval
    )


class _Load:
    """What is refreshed at one step: seconds of its slowest rank, or of a node's ranks on the cores they share."""

    def __init__(self, node_size: int, node_cores: int) -> None:
        self.node_size, self.node_cores = node_size, node_cores
        self.seconds = 0.0
        self._busy: dict[tuple[str, int], float] = {}

    def _parts(self, work: Mapping[int, float]) -> dict[tuple[str, int], float]:
        parts = {("rank", rank): more for rank, more in work.items()}
        for rank, more in work.items() if self.node_cores else ():
            node = "node", rank // self.node_size
            parts[node] = parts.get(node, 0.0) + more / self.node_cores
        return parts

    def longer(self, work: Mapping[int, float]) -> float:
        """By how much more work would make the step longer."""
        # by differences, so that work comes out exactly equal on an idle step and after the slowest rank's own
        parts = self._parts(work).items()
        return max(0.0, *(more - (self.seconds - self._busy.get(part, 0.0)) for part, more in parts))

    def add(self, work: Mapping[int, float]) -> None:
        for part, more in self._parts(work).items():
            self._busy[part] = self._busy.get(part, 0.0) + more
            self.seconds = max(self.seconds, self._busy[part])


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
