"""Who: the rank that decomposes each factor, and those that precondition each layer. Pure; the same on every rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac.costs import CostModel
from ds_kfac.decomposers import place_decomposers
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.layers.base import LayerSpec
from ds_kfac.work import Work
from ds_kfac.workers import place_workers


@dataclass(frozen=True)
class Assignment:
    """Roles of ranks.

    Attributes:
        decomposers: factor key -> the rank that keeps its running average and decomposes it.
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
            {factor.key: decomposers[factor.key] for factor in work.factors},
            {layer.name: workers[layer.name] for layer in work.layers},
            tuple(work.loads(workers, decomposers)),
            tuple(work.memory(workers, decomposers)),
        )

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.world / total if total else 1.0

    def source(self, layer: str, rank: int) -> int:
        """The worker whose result ``rank`` gets: the one in its row of the grid, itself if it is a worker."""
        workers = self.workers[layer]
        return workers[rank * len(workers) // self.world]


def assign(
    layers: Sequence[LayerSpec],
    factors: Sequence[FactorSpec],
    *,
    world: int,
    workers: int,
    held: Mapping[str, Sequence[int]] | None,
    costs: CostModel,
    update_interval: int,
    refresh_interval: int,
    load_tolerance: float,
    split_factors: bool,
    memory_cap: float | None = None,
    moments: int = 0,
    exact_every: int = 1,
    method: str = "eigen",
) -> Assignment:
    """Heaviest first to the least loaded rank: layers to columns of workers, then factors to decomposers.

    Several plans are made, whole layers balanced or only their preconditioning, and the one with the smallest largest
    load is taken; if none respects the cap, one that balances bytes.

    Args:
        workers: gradient workers per layer, a divisor of ``world``; 1 with ``held``.
        held: per layer name, gradient elements on each rank (len ``world``), of which a layer's worker should have
            most; None for replicated gradients.
        load_tolerance: accepted excess over the mean load, e.g. 0.1, before a layer leaves its holder.
        memory_cap: bytes of K-FAC state per rank.
        split_factors: whether a layer's two factors may be on different ranks: any of its workers, any rank at all
            if it has one worker only. Tied layers' are not.
        moments: fp32 tensors of the gradient's shape that workers keep.
        exact_every: of so many refreshes one is exact.
        method: "eigen" or "inverse": what workers keep of a factor.

    Raises:
        ValueError: no plan respects the cap.
    """
    assert world % workers == 0 and (held is None or workers == 1), "workers: a divisor of world, 1 under ZeRO"
    work = Work(layers, factors, world, held, costs, update_interval, refresh_interval, moments, exact_every, method)

    kinds = ((True, False), (True, True), (False, True)) if split_factors else ((True, False),)

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
        raise ValueError(_too_large(min(max(plan.memory) for plan in candidates), cap, world, workers))
    return min(fitting, key=lambda plan: (max(plan.loads), sum(plan.loads)))


def _too_large(smallest: int, memory_cap: float, world: int, workers: int) -> str:
    ways = ["a smaller factor.max_dim", f"more than {world} ranks"]
    if workers > 1:
        ways.insert(0, f"a smaller gradient worker fraction than {workers / world:.6g}")
    return (
        f"K-FAC state: the memory cap is {memory_cap:.0f} bytes per rank, but the smallest assignment found needs "
        f"{smallest} ({smallest / 2**30:.3g} GiB); raise the cap, or use {' or '.join(ways)}"
    )
