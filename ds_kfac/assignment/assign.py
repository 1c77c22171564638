"""Who: the rank that decomposes each factor, and those that precondition each layer. Pure; the same on every rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ds_kfac.assignment.decomposers import place_decomposers
from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.assignment.work import Work
from ds_kfac.assignment.workers import LOAD_TOLERANCE, place_workers


@dataclass(frozen=True)
class Assignment:
    """Roles of ranks.

    Attributes:
        decomposers: factor key -> the rank that keeps its running average and decomposes it; also of factors that
            layers would have if they did not share one.
        workers: layer name -> ranks that hold its eigenbases and precondition its gradient, ascending. One under ZeRO,
            a column of the KAISA grid where gradients are replicated, see ``grid.py``.
        loads: modelled seconds per step of each rank; what all ranks do alike is left out.
        memory: modelled bytes of K-FAC state of each rank.
    """

    world: int
    factors: tuple[FactorSpec, ...]
    decomposers: Mapping[str, int]
    workers: Mapping[str, tuple[int, ...]]
    loads: tuple[float, ...]
    memory: tuple[int, ...]

    @classmethod
    def of(cls, work: Work, workers: Mapping[str, tuple[int, ...]], decomposers: Mapping[str, int]) -> "Assignment":
        """With its loads and memory, in module order."""
        return cls(
            work.world,
            tuple(work.factors),
            {**{factor.key: decomposers[factor.key] for factor in work.factors}, **decomposers},
            {layer.name: workers[layer.name] for layer in work.layers},
            tuple(work.loads(workers, decomposers)),
            tuple(work.memory(workers, decomposers)),
        )

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.world / total if total else 1.0


def assign(
    work: Work,
    workers: int,
    *,
    load_tolerance: float = LOAD_TOLERANCE,
    paired: bool = False,
    memory_cap: float | None = None,
) -> Assignment:
    """Heaviest first to the least loaded rank: layers to columns of workers, then factors to decomposers.

    Several plans are made, whole layers balanced or only their preconditioning, and the one with the smallest largest
    load is taken; if none respects the cap, one that balances bytes.

    Args:
        workers: gradient workers per layer, a divisor of the world; 1 where gradients are partitioned.
        load_tolerance: accepted excess over the mean load before a layer leaves the rank that holds its gradient.
        paired: whether a layer's two factors must be on one rank. Else they may be on any of its workers.
        memory_cap: bytes of K-FAC state per rank.

    Raises:
        ValueError: no plan respects the cap.
    """
    assert work.world % workers == 0 and (work.held is None or workers == 1), "a divisor of the world, 1 under ZeRO"
    kinds = ((True, False), (True, True), (False, True)) if workers > 1 and not paired else ((True, False),)

    def plans(*, by_memory: bool) -> list[Assignment]:
        found = []
        for whole, split in kinds:
            placed = place_workers(
                work, workers, load_tolerance=load_tolerance, whole=whole, memory_cap=memory_cap, by_memory=by_memory
            )
            decomposers = place_decomposers(work, placed, split=split, memory_cap=memory_cap, by_memory=by_memory)
            found.append(Assignment.of(work, placed, decomposers))
        return found

    cap = math.inf if memory_cap is None else memory_cap
    candidates = plans(by_memory=False)
    fitting = [plan for plan in candidates if max(plan.memory) <= cap]
    if not fitting:
        candidates = plans(by_memory=True)
        fitting = [plan for plan in candidates if max(plan.memory) <= cap]
    if not fitting:
        raise ValueError(_too_large(min(max(plan.memory) for plan in candidates), cap, work.world, workers))
    return min(fitting, key=lambda plan: (max(plan.loads), sum(plan.loads)))


def _too_large(smallest: int, memory_cap: float, world: int, workers: int) -> str:
    ways = ["a smaller factor.max_dim", f"more than {world} ranks"]
    if workers > 1:
        ways.insert(0, f"a smaller gradient worker fraction than {workers / world:.6g}")
    return (
        f"K-FAC state: the memory cap is {memory_cap:.0f} bytes per rank, but the smallest assignment found needs "
        f"{smallest} ({smallest / 2**30:.3g} GiB); raise the cap, or use {' or '.join(ways)}"
    )
