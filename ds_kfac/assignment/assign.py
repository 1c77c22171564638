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

from ds_kfac.assignment.costs import FactorSpec, Work, Workers, kept_bytes, packed_bytes


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
    workers: Workers
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
    cap = math.inf if memory_cap is None else memory_cap
    found: list[Assignment] = []
    for by_memory in (False, True):
        found.clear()
        for whole, split in kinds:
            placed = place_workers(work, workers, whole=whole, memory_cap=cap, by_memory=by_memory)
            homes = place_eigen_workers(work, placed, split=split, memory_cap=cap, by_memory=by_memory)
            found.append(Assignment(work, placed, {factor.key: homes[factor.key] for factor in work.factors}))
        if fitting := [plan for plan in found if max(plan.memory) <= cap]:
            return min(fitting, key=lambda plan: (max(plan.loads), sum(plan.loads)))
    smallest = min(max(plan.memory) for plan in found)
    ways = [f"a smaller gradient worker fraction than {workers / work.world:.6g}"] if workers > 1 else []
    ways += ["a smaller factor.dense_max", f"more than {work.world} ranks"]
    raise ValueError(
        f"K-FAC state: the memory cap is {cap:.0f} bytes per rank, but the smallest assignment found needs "
        f"{smallest} ({smallest / 2**30:.3g} GiB); raise the cap, or use {' or '.join(ways)}"
    )


LOAD_TOLERANCE = 0.1
"""Part by which a rank's load may pass the mean before a layer leaves the rank that holds its gradient."""
NEAR_TIE = 0.99
"""Ranks holding at least this part of what the majority holder holds count as equals (ZeRO-3 chunks, replicas)."""


def place_workers(work: Work, workers: int, *, whole: bool, memory_cap: float, by_memory: bool) -> Workers:
    """Layer name -> its workers.

    With ``work.held`` the majority holder takes a layer if its load stays within ``1 + LOAD_TOLERANCE`` of the mean;
    otherwise the least loaded rank does, moving included. Near-equal holders compete by load, and at the end a rank
    without a layer takes one from the fullest rank that has two.

    Args:
        whole: the layer's factors come with it, their decompositions spread evenly over its column; else only its
            preconditioning counts, they are placed on their own.
        by_memory: balance bytes in place of seconds.
    """
    count, part = work.world // workers, whole / workers
    loads, memory = [0.0] * count, [0.0] * count  # of each rank of a column
    bases: dict[str, set[int]] = {factor.key: set() for factor in work.factors}
    kept = {factor.key: kept_bytes(factor.side, work.method) for factor in work.factors}
    weights, sizes = dict[str, float](), dict[str, float]()  # of a layer wherever it is; of a shared factor equal parts
    for layer in work.layers:
        used = [(factor, len(factor.layers)) for factor in work.used[layer.name]]
        shares = sum(part * work.factor[factor.key] / users for factor, users in used)
        weights[layer.name] = work.precondition[layer.name] + shares
        nbytes = sum((kept[factor.key] + part * packed_bytes(factor.side)) / users for factor, users in used)
        sizes[layer.name] = sum(work.worker_bytes(layer)) + nbytes
    limit = (1 + LOAD_TOLERANCE) * sum(weights.values()) / count
    heaviest = sizes if by_memory else weights
    placed: dict[str, int] = {}
    for layer in sorted(work.layers, key=lambda layer: heaviest[layer.name], reverse=True):  # stable: module order
        own, after = sum(work.worker_bytes(layer)), []
        for i in range(count):
            seconds, nbytes = work.precondition[layer.name] + work.moved(layer, i), memory[i] + own
            for factor in work.used[layer.name]:
                if not (there := bases[factor.key]):
                    seconds += part * work.factor[factor.key]
                    nbytes += kept[factor.key] + part * packed_bytes(factor.side)
                elif i not in there:  # where it is, it is free
                    seconds += work.travel(factor)
                    nbytes += kept[factor.key]
            after.append((loads[i] + seconds, nbytes))
        fits = [i for i in range(count) if after[i][1] <= memory_cap]
        by = int(by_memory or not fits)
        index = min(fits or range(count), key=lambda i: after[i][by])  # the first of equals
        if work.held is not None and not by_memory:
            held = work.held[layer.name]
            holders = [i for i in fits if held[i] >= NEAR_TIE * max(held)]
            holder = min(holders, key=lambda i: loads[i], default=None)
            if holder is not None and after[holder][0] <= limit:
                index = holder
        loads[index], memory[index] = after[index]
        for factor in work.used[layer.name]:
            bases[factor.key].add(index)
        placed[layer.name] = index
    if work.held is not None and not by_memory:
        _employ_idle(placed, loads, weights)
    return {layer.name: column(placed[layer.name], world=work.world, workers=workers) for layer in work.layers}


def _employ_idle(placed: dict[str, int], loads: list[float], weights: Mapping[str, float]) -> None:
    for idle in (index for index, load in enumerate(loads) if load == 0):
        counts = Counter(placed.values())
        donors = [index for index in range(len(loads)) if counts[index] >= 2]
        if not donors:
            return
        donor = max(donors, key=lambda index: loads[index])
        name = min((name for name, index in placed.items() if index == donor), key=lambda name: weights[name])
        placed[name] = idle
        loads[donor] -= weights[name]
        loads[idle] += weights[name]


def place_eigen_workers(
    work: Work, workers: Workers, *, split: bool, memory_cap: float, by_memory: bool
) -> Mapping[str, int]:
    """Factor key -> eigen worker.

    A layer's factors go to one of its workers, one that several layers share to a worker of any of them. With
    ``split`` A and G of a layer may part, if that pays.
    """
    loads, memory = work.loads(workers, {}), work.memory(workers, {})
    found: dict[str, int] = {}

    def seconds(item: tuple[FactorSpec, ...]) -> float:
        return sum(work.factor[factor.key] for factor in item)

    def size(item: tuple[FactorSpec, ...]) -> float:
        return sum(packed_bytes(factor.side) for factor in item)

    for item in sorted(_items(work, workers, split), key=size if by_memory else seconds, reverse=True):  # stable
        of_each = [work.users(factor, workers) for factor in item]
        users, at_home = set.union(*of_each), sorted(set.intersection(*of_each))
        fits = [rank for rank in at_home if memory[rank] + size(item) <= memory_cap]
        if fits and not by_memory:
            rank = _soonest(fits, loads, users, seconds(item), sum(work.travel(factor) for factor in item))
        else:
            rank = min(fits or at_home, key=lambda rank: (memory[rank], rank))
        memory[rank] += int(size(item))
        for factor, its in zip(item, of_each, strict=True):
            found[factor.key] = rank
            work.decompose(loads, factor, rank, its)
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


def _soonest(among: list[int], loads: list[float], users: set[int], seconds: float, travel: float) -> int:
    """Where the largest load among eigen worker and users ends up smallest; then the least loaded.

    Args:
        among: some of ``users``.
        travel: seconds for either end of one copy of the eigenbases.
    """
    first, second = heapq.nlargest(2, [*((loads[rank], rank) for rank in users), (0.0, -1)])

    def outcome(rank: int) -> tuple[float, float, int]:
        busiest = (second if first[1] == rank else first)[0]  # of the users that receive
        after = loads[rank] + seconds + (len(users) - 1) * travel
        return max(after, busiest + travel), after, rank

    return min(among, key=outcome)


ROUNDING = 0.01
"""A fraction this close, relatively, to a valid one means it: 0.33 of 3 ranks."""


def worker_counts(world: int) -> tuple[int, ...]:
    """Every possible g: the divisors of ``world``, ascending."""
    return tuple(count for count in range(1, world + 1) if world % count == 0)


def workers_for(fraction: float, world: int) -> int:
    """g = max(1, fraction W).

    Raises:
        ValueError: g does not divide W; names the nearest fractions.
    """
    wanted = max(1.0, fraction * world)
    counts = worker_counts(world)
    nearest = min(counts, key=lambda count: abs(count - wanted))
    if abs(nearest - wanted) <= ROUNDING * wanted:
        return nearest
    above = bisect_right(counts, wanted)
    options = " or ".join(f"{count / world:.6g} (g = {count})" for count in counts[above - 1 : above + 1])
    raise ValueError(
        f"kfac.assignment.gradient_worker_fraction: got {fraction}, which is {wanted:.6g} of {world} ranks; the number "
        f"of workers must divide {world}: {options}"
    )


def column(index: int, *, world: int, workers: int) -> tuple[int, ...]:
    """Ranks of a column, ascending, one per row."""
    return tuple(range(index, world, world // workers))
