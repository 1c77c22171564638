"""Who: the rank that decomposes each factor, and those that precondition each layer. Pure; the same on every rank.

The KAISA grid (Pauloski et al. 2021) says which ranks precondition a layer together, and who gets their result. World
W, g gradient workers a layer, p = W / g columns: rank r stands in column r % p and row r // p. A layer belongs to a
column, whose g ranks all precondition it; each hands its result to its row, p consecutive ranks, mostly of one node.
g = 1 is MEM-OPT, g = W COMM-OPT.
"""

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ds_kfac.assignment.work import FactorSpec, Work, kept_bytes, packed_bytes
from ds_kfac.model.layers import LayerSpec


@dataclass(frozen=True)
class Assignment:
    """Roles of ranks.

    Attributes:
        work: what is assigned.
        workers: layer name -> ranks that hold its eigenbases and precondition its gradient, ascending. One under ZeRO,
            a column of the KAISA grid where gradients are replicated.
        eigen_workers: factor key -> the rank that keeps its running average and decomposes it; also of factors that
            layers would have if they did not share one.
    """

    work: Work
    workers: Mapping[str, tuple[int, ...]]
    eigen_workers: Mapping[str, int]

    @property
    def world(self) -> int:
        return self.work.world

    @property
    def factors(self) -> Sequence[FactorSpec]:
        return self.work.factors

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Modelled seconds per step of each rank; what all ranks do alike is left out."""
        return tuple(self.work.loads(self.workers, self.eigen_workers))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Modelled bytes of K-FAC state of each rank."""
        return tuple(self.work.memory(self.workers, self.eigen_workers))

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.world / total if total else 1.0


def assign(work: Work, workers: int, *, paired: bool = False, memory_cap: float | None = None) -> Assignment:
    """Heaviest first to the least loaded rank: layers to columns of workers, then factors to eigen workers.

    Several plans are made, whole layers balanced or only their preconditioning, and the one with the smallest largest
    load is taken; if none respects the cap, one that balances bytes.

    Args:
        workers: gradient workers per layer, a divisor of the world; 1 where gradients are partitioned.
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
            placed = place_workers(work, workers, whole=whole, memory_cap=memory_cap, by_memory=by_memory)
            homes = place_eigen_workers(work, placed, split=split, memory_cap=memory_cap, by_memory=by_memory)
            in_order = {layer.name: placed[layer.name] for layer in work.layers}
            found.append(Assignment(work, in_order, {factor.key: homes[factor.key] for factor in work.factors}))
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
    ways = ["a smaller factor.dense_max", f"more than {world} ranks"]
    if workers > 1:
        ways.insert(0, f"a smaller gradient worker fraction than {workers / world:.6g}")
    return (
        f"K-FAC state: the memory cap is {memory_cap:.0f} bytes per rank, but the smallest assignment found needs "
        f"{smallest} ({smallest / 2**30:.3g} GiB); raise the cap, or use {' or '.join(ways)}"
    )


LOAD_TOLERANCE = 0.1
"""Part by which a rank's load may pass the mean before a layer leaves the rank that holds its gradient."""
NEAR_TIE = 0.99
"""Ranks holding at least this part of what the majority holder holds count as equals (ZeRO-3 chunks, replicas)."""


def place_workers(
    work: Work, workers: int, *, whole: bool, memory_cap: float | None, by_memory: bool
) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> its workers.

    With ``work.held`` the majority holder takes a layer if its load stays within ``1 + LOAD_TOLERANCE`` of the mean;
    otherwise the least loaded rank does, moving included. Near-equal holders compete by load, and at the end a rank
    without a layer takes one from the fullest rank that has two.

    Args:
        whole: the layer's factors come with it; else only its preconditioning counts, they are placed on their own.
        by_memory: balance bytes in place of seconds.
    """
    grid = _Columns(work, workers, whole)
    limit = (1 + LOAD_TOLERANCE) * sum(grid.weight(layer) for layer in work.layers) / grid.count
    placed: dict[str, int] = {}
    heaviest = sorted(work.layers, key=grid.size if by_memory else grid.weight, reverse=True)  # stable: module order
    for layer in heaviest:
        fits = [
            index
            for index in range(grid.count)
            if memory_cap is None or grid.memory[index] + grid.added_bytes(layer, index) <= memory_cap
        ]
        index = _least(grid, layer, fits or list(range(grid.count)), by_memory or not fits)
        if work.held is not None and not by_memory:
            held = work.held[layer.name]
            most = max(held)
            holders = [index for index in fits if held[index] >= NEAR_TIE * most]
            holder = min(holders, key=lambda index: grid.loads[index], default=None)
            if holder is not None and grid.loads[holder] + grid.added(layer, holder) <= limit:
                index = holder
        grid.add(layer, index)
        placed[layer.name] = index
    if work.held is not None and not by_memory:
        _employ_idle(placed, grid)
    return {name: column(index, world=work.world, workers=workers) for name, index in placed.items()}


def _least(grid: "_Columns", layer: LayerSpec, among: list[int], by_memory: bool) -> int:
    """Where the load, or memory, is least once the layer is there; the first of equals."""
    if by_memory:
        return min(among, key=lambda index: grid.memory[index] + grid.added_bytes(layer, index))
    return min(among, key=lambda index: grid.loads[index] + grid.added(layer, index))


class _Columns:
    """Per-rank load and memory of each grid column during placement, decompositions spread evenly inside it."""

    def __init__(self, work: Work, workers: int, whole: bool) -> None:
        self.work, self.workers, self.whole = work, workers, whole
        self.count = work.world // workers
        self.loads = [0.0] * self.count
        self.memory = [0] * self.count
        self._bases: dict[str, set[int]] = {factor.key: set() for factor in work.factors}

    def weight(self, layer: LayerSpec) -> float:
        """Seconds of a layer wherever it is; those of a shared factor in equal parts."""
        shares = sum(self.work.factor[factor.key] / len(factor.layers) for factor in self.work.used[layer.name])
        return self.work.precondition[layer.name] + (shares / self.workers if self.whole else 0.0)

    def size(self, layer: LayerSpec) -> float:
        """Bytes of a layer, likewise."""
        shares = sum(
            (
                kept_bytes(factor.side, self.work.method)
                + (packed_bytes(factor.side) / self.workers if self.whole else 0)
            )
            / len(factor.layers)
            for factor in self.work.used[layer.name]
        )
        return self.work.worker_bytes(layer) + shares

    def added(self, layer: LayerSpec, index: int) -> float:
        """Seconds that a layer adds to each rank of a column: an eigenbasis that is there already is free."""
        seconds = self.work.precondition[layer.name] + self.work.moved(layer, index)
        for factor in self.work.used[layer.name]:
            bases = self._bases[factor.key]
            if bases and index not in bases:
                seconds += self.work.travel[factor.key]
            elif not bases and self.whole:
                seconds += self.work.factor[factor.key] / self.workers
        return seconds

    def added_bytes(self, layer: LayerSpec, index: int) -> int:
        """The same in bytes."""
        total = self.work.worker_bytes(layer)
        for factor in self.work.used[layer.name]:
            bases = self._bases[factor.key]
            if index not in bases:
                total += kept_bytes(factor.side, self.work.method)
            if not bases and self.whole:
                total += packed_bytes(factor.side) // self.workers
        return total

    def add(self, layer: LayerSpec, index: int) -> None:
        self.loads[index] += self.added(layer, index)
        self.memory[index] += self.added_bytes(layer, index)
        for factor in self.work.used[layer.name]:
            self._bases[factor.key].add(index)


def _employ_idle(placed: dict[str, int], grid: _Columns) -> None:
    weights = {layer.name: grid.weight(layer) for layer in grid.work.layers}
    for idle in (index for index, load in enumerate(grid.loads) if load == 0):
        counts = Counter(placed.values())
        donors = [index for index in range(grid.count) if counts[index] >= 2]
        if not donors:
            return
        donor = max(donors, key=lambda index: grid.loads[index])
        name = min((name for name, index in placed.items() if index == donor), key=lambda name: weights[name])
        placed[name] = idle
        grid.loads[donor] -= weights[name]
        grid.loads[idle] += weights[name]


Workers = Mapping[str, tuple[int, ...]]


def place_eigen_workers(
    work: Work, workers: Workers, *, split: bool, memory_cap: float | None, by_memory: bool
) -> Mapping[str, int]:
    """Factor key -> eigen worker.

    A layer's factors go to one of its workers, one that several layers share to a worker of any of them. With
    ``split`` A and G of a layer may part, if that pays.
    """
    loads, memory = work.loads(workers, {}), work.memory(workers, {})
    found: dict[str, int] = {}

    def cost(item: tuple[FactorSpec, ...]) -> float:
        return sum(packed_bytes(factor.side) if by_memory else work.factor[factor.key] for factor in item)

    for item in sorted(_items(work, workers, split), key=cost, reverse=True):  # stable: module order
        users = set.union(*(work.users(factor, workers) for factor in item))
        at_home = set.intersection(*(work.users(factor, workers) for factor in item))
        size = sum(packed_bytes(factor.side) for factor in item)
        allowed = sorted(at_home)
        fits = [rank for rank in allowed if memory_cap is None or memory[rank] + size <= memory_cap]
        if fits and not by_memory:
            rank = _soonest(fits, loads, users, sum(work.factor[f.key] for f in item), _travel(work, item))
        else:
            rank = min(fits or allowed, key=lambda rank: (memory[rank], rank not in users, rank))
        memory[rank] += size
        for factor in item:
            found[factor.key] = rank
            work.decompose(loads, factor, rank, work.users(factor, workers))
    return found


def _items(work: Work, workers: Workers, split: bool) -> list[tuple[FactorSpec, ...]]:
    """What is decomposed on one rank: both factors of a layer unless they may part."""
    home: dict[str, str] = {}
    if not split:
        for used in work.used.values():
            own = [factor.key for factor in used if len(factor.layers) == 1]
            home |= dict.fromkeys(own, next(iter(own), ""))
    items: dict[str, list[FactorSpec]] = {}
    for factor in work.factors:
        items.setdefault(home.get(factor.key, factor.key), []).append(factor)
    return [tuple(item) for item in items.values()]


def _travel(work: Work, item: tuple[FactorSpec, ...]) -> float:
    return sum(work.travel[factor.key] for factor in item)


def _soonest(among: list[int], loads: list[float], users: set[int], seconds: float, travel: float) -> int:
    """Where the largest load among eigen worker and users ends up smallest; then the least loaded; then a user.

    Args:
        travel: seconds for either end of one copy of the eigenbases.
    """
    none = (0.0, -1)
    first, second = heapq.nlargest(2, chain(((loads[rank], rank) for rank in users), (none, none)))

    def outcome(rank: int) -> tuple[float, float, bool, int]:
        busiest = (second if first[1] == rank else first)[0]  # of the users that receive
        copies = len(users) - (rank in users)
        after = loads[rank] + seconds + copies * travel
        return max(after, busiest + travel if copies else busiest), after, rank not in users, rank

    return min(among, key=outcome)


ROUNDING = 0.01
"""A fraction this close, relatively, to a valid one means it: 0.33 of 3 ranks."""


def worker_counts(world: int) -> tuple[int, ...]:
    """Every possible g: the divisors of ``world``, ascending."""
    return tuple(count for count in range(1, world + 1) if world % count == 0)


def workers_for(fraction: float, world: int) -> int:
    """g = max(1, fraction W).

    Raises:
        ValueError: outside 0..1, or g does not divide W; names the nearest fractions.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"gradient worker fraction: got {fraction}; must be between 0 and 1")
    wanted = max(1.0, fraction * world)
    counts = worker_counts(world)
    nearest = min(counts, key=lambda count: abs(count - wanted))
    if abs(nearest - wanted) <= ROUNDING * wanted:
        return nearest
    above = bisect_right(counts, wanted)
    options = " or ".join(f"{count / world:.6g} (g = {count})" for count in counts[above - 1 : above + 1])
    raise ValueError(
        f"gradient worker fraction: got {fraction}, which is {wanted:.6g} of {world} ranks; the number of workers must "
        f"divide {world}: {options}"
    )


def column(index: int, *, world: int, workers: int) -> tuple[int, ...]:
    """Ranks of a column, ascending, one per row."""
    return tuple(range(index, world, world // workers))
