"""When within the interval each factor is refreshed, so that no step does more than its share. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac.assignment.cost_model import CostModel
from ds_kfac.assignment.factor_spec import FactorSpec

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
    decomposers: Mapping[str, int],
    costs: CostModel,
    *,
    update_interval: int,
    refresh_interval: int,
    method: str = "eigen",
    alone: bool = False,
) -> Stagger:
    """Heaviest first, each to the step where the slowest rank suffers least.

    A step takes as long as its slowest rank, so work of one rank goes where another is as busy anyway, and else to the
    emptiest step. Ranks of a node that share ``node_cores`` cores also have to wait for each other.
    Captures of one step, D^2 each, are kept near their mean on every rank.

    Args:
        decomposers: factor key -> rank.
        refresh_interval: if it is no multiple of ``update_interval``, the steps past the largest one stay empty.
        method: a key of ``FACTOR_FORMS``: what a refresh is.
        alone: whether a factor is captured by its decomposer (and a few ranks more), or by every rank.
    """
    steps = refresh_interval // update_interval * update_interval or refresh_interval
    captures = min(update_interval, steps)
    seconds = {factor.key: costs.decompose(factor.side, method) for factor in factors}
    squares = [Counter({decomposers[factor.key] if alone else EVERYONE: factor.side.dim**2}) for factor in factors]
    everything = sum(squares, Counter[int]())
    largest = max((max(own.values()) for own in squares), default=0)
    limit = max(largest, (1 + CAPTURE_TOLERANCE) * max(everything.values(), default=0) / captures)
    captured = [Counter[int]() for _ in range(captures)]
    loads = [_Load(costs.node_size, costs.node_cores) for _ in range(steps)]
    offsets: dict[str, int] = {}

    heaviest = sorted(range(len(factors)), key=lambda i: (-seconds[factors[i].key], -squares[i].total()))
    for i in heaviest:
        key = factors[i].key
        work = {decomposers[key]: seconds[key]}
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
