"""Who: the rank that decomposes each factor and at which step, those that precondition each layer, and those whose rows
a factor sees. Pure; the same on every rank.

The KAISA grid (Pauloski et al. 2021) says which ranks precondition a layer together, and who gets their result. World
W, g gradient workers a layer, p = W / g columns: rank r stands in column r % p and row r // p. A layer belongs to a
column, whose g ranks all precondition it; each hands its result to its row, p consecutive ranks, mostly of one node.
g = 1 is MEM-OPT, g = W COMM-OPT.
"""

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ds_kfac.assignment.costs import FactorSpec, Work, Workers, kept_bytes, packed_bytes
from ds_kfac.model.convolutions import phase


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

    Of plans that balance whole layers or only their preconditioning, with or without sending replicated results, the
    one with the smallest largest load is taken; if none respects the cap, one that balances bytes.

    Args:
        workers: gradient workers per layer, a divisor of the world; 1 where gradients are partitioned.
        paired: whether a layer's two factors must be on one rank, else on any of its workers.
        memory_cap: bytes of K-FAC state per rank.

    Raises:
        ValueError: no plan respects the cap.
    """
    assert work.world % workers == 0 and (work.held is None or workers == 1), "a divisor of the world, 1 under ZeRO"
    kinds = ((True, False), (True, True), (False, True)) if workers > 1 and not paired else ((True, False),)
    cap, sends = math.inf if memory_cap is None else memory_cap, work.held is None and work.world > workers
    found: list[Assignment] = []
    for by_memory in (False, True):
        found.clear()
        movings = (True, False) if sends and not by_memory else (True,)
        for (whole, split), moving in itertools.product(kinds, movings):
            placed = place_workers(work, workers, whole=whole, moving=moving, memory_cap=cap, by_memory=by_memory)
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


def place_workers(
    work: Work, workers: int, *, whole: bool, moving: bool, memory_cap: float, by_memory: bool
) -> Workers:
    """Layer name -> its workers.

    With ``work.held`` the majority holder takes a layer if its load stays within ``1 + LOAD_TOLERANCE`` of the mean,
    else the least loaded rank, moving included. Near-equal holders compete by load; at the end a rank without a layer
    takes one from the fullest rank that has two.

    Args:
        whole: the layer's factors come with it, their decompositions spread evenly over its column; else only its
            preconditioning counts, they are placed on their own.
        moving: results that are sent where gradients are replicated count, too; else gradients always do.
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
        sent = work.moved(layer, 0, workers) if moving and work.held is None else 0.0
        for i in range(count):
            moved = sent if work.held is None else work.moved(layer, i)
            seconds, nbytes = work.precondition[layer.name] + moved, memory[i] + own
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
        donor = max((i for i in range(len(loads)) if counts[i] >= 2), key=loads.__getitem__, default=None)
        if donor is None:
            return
        name = min((name for name, index in placed.items() if index == donor), key=weights.__getitem__)
        placed[name] = idle
        loads[donor] -= weights[name]
        loads[idle] += weights[name]


def place_eigen_workers(
    work: Work, workers: Workers, *, split: bool, memory_cap: float, by_memory: bool
) -> Mapping[str, int]:
    """Factor key -> eigen worker: of a layer's factors one of its workers, of one that several layers share a worker of
    any of them. With ``split`` A and G of a layer may part, if that pays."""
    loads, memory = work.loads(workers, {}), work.memory(workers, {})
    found: dict[str, int] = {}

    def seconds(item: tuple[FactorSpec, ...]) -> float:
        return sum(work.factor[factor.key] for factor in item)

    def size(item: tuple[FactorSpec, ...]) -> float:
        return sum(packed_bytes(factor.side) for factor in item)

    for item in sorted(_items(work, split), key=size if by_memory else seconds, reverse=True):  # stable
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


def _items(work: Work, split: bool) -> list[tuple[FactorSpec, ...]]:
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
    """Where, among some users, the largest load of eigen worker and users ends up smallest, then the least loaded;
    ``travel`` is the seconds of either end of one copy of the eigenbases."""
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
    """g = max(1, fraction W). Raises ValueError if g does not divide W, with the nearest fractions."""
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


EVERYONE = -1
CAPTURE_TOLERANCE = 0.1
"""Accepted excess of a rank's captures at a step over their mean: they may give a little for an even refresh."""


def refresh_offsets(
    factors: Sequence[FactorSpec], eigen_workers: Mapping[str, int], work: Work, *, alone: bool = False
) -> tuple[Mapping[str, int], float]:
    """Factor key -> the step, modulo the refresh interval, at which it is refreshed; modulo the update interval, at
    which it is captured. And seconds of the slowest rank at the slowest step.

    Heaviest first, each to the step where the slowest rank suffers least: a step takes as long as that, so work of one
    rank goes where another is as busy anyway, and else to the emptiest step. Ranks of a node that share ``node_cores``
    cores also wait for each other. Captures of one step, D^2 each, are kept near their mean on every rank. Other
    factors of ``work`` are at step 0. If the refresh interval is no multiple of the update interval, the steps past the
    largest one stay empty. ``alone``: a factor is captured by its eigen worker and a few ranks more, not by every rank.
    """
    costs, refresh, update = work.costs, work.refresh_interval, work.update_interval
    steps = refresh // update * update or refresh
    captures = min(update, steps)
    seconds = {factor.key: costs.decompose(factor.side, work.method) for factor in (*work.factors, *factors)}
    squares = {factor.key: factor.side.dim**2 for factor in factors}
    who = {key: eigen_workers[key] if alone else EVERYONE for key in squares}
    everything = Counter[int]()
    for key, square in squares.items():
        everything[who[key]] += square
    most = max(everything.values(), default=0)
    limit = max(*squares.values(), (1 + CAPTURE_TOLERANCE) * most / captures, 0)
    captured = [Counter[int]() for _ in range(captures)]
    busy: list[dict[Any, float]] = [{} for _ in range(steps)]  # a rank, or a node's cores
    length, offsets = [0.0] * steps, dict.fromkeys(squares, 0)
    heaviest = sorted(squares, key=lambda key: (-seconds[key], -squares[key]))
    for key in (*(factor.key for factor in work.factors if factor.key not in squares), *heaviest):
        rank, worst, step = eigen_workers[key], max(length), 0
        parts: dict[Any, float] = {rank: seconds[key]}
        if costs.node_cores:
            parts["node", rank // costs.node_size] = seconds[key] / costs.node_cores
        if key in squares:
            after_it, outcomes = [now[who[key]] + squares[key] for now in captured], []
            fewest = max(limit, min(after_it))
            for step in (step for step in range(steps) if after_it[step % captures] <= fewest):
                # by differences, so that work comes out exactly equal on an idle step and after the slowest rank's own
                longer = max(0.0, *(more - (length[step] - busy[step].get(part, 0.0)) for part, more in parts.items()))
                after = length[step] + longer
                outcomes.append((max(worst, after), longer, after, after_it[step % captures], step))
            step = offsets[key] = min(outcomes)[-1]
            captured[step % captures][who[key]] += squares[key]
        for part, more in parts.items():
            busy[step][part] = busy[step].get(part, 0.0) + more
            length[step] = max(length[step], busy[step][part])
    return offsets, max(length)


ROWS_PER_COLUMN = 4
"""Rows of an update per column of a factor, where the config names no number."""


@dataclass(frozen=True)
class Contributors:
    """Of ``world`` ranks, ``node_size`` consecutive ones a node.

    Attributes:
        counts: factor key -> how many contribute to an update; all of them to those that are missing.
        strides: factor key -> of how many rows of a contributor one counts; all of those that are missing.
        sequence: so many consecutive ranks have the parts of one sequence: all of them contribute, or none. A factor
            would see one part of all sequences for ever.
    """

    world: int
    node_size: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    sequence: int = 1
    strides: Mapping[str, int] = field(default_factory=dict)

    def of(self, key: str, owner: int, step: int) -> Sequence[int]:
        """Ranks that contribute to a factor at ``step``, ascending: those of the eigen worker's node first.

        Args:
            owner: its eigen worker.
        """
        count, everyone = self.counts.get(key, self.world), range(self.world)
        if count >= self.world:
            return everyone
        if (parts := self.sequence) > 1:
            whole = Contributors(self.world // parts, max(1, self.node_size // parts), {key: -(-count // parts)})
            found = whole.of(key, owner // parts, step)
            return tuple(parts * sequence + part for sequence in found for part in range(parts))
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

    A factor is an average over many updates, each of which needs a few rows per column, whatever the number of ranks.
    So what statistics cost a rank falls with the number of ranks: each captures, sums and sends its part only.

    Args:
        rows: factor key -> rows of a rank in a step; factors that are missing take all ranks.
        wanted: rows of an update; None: in proportion to the widest block.
    """
    counts = {}
    for factor in factors:
        here = rows.get(factor.key, 0.0)
        if here > 0 and (count := max(1, int(-(-needed(factor, wanted) // here)))) < world:
            counts[factor.key] = count
    return counts


def strides(
    factors: Sequence[FactorSpec], rows: Mapping[str, float], *, wanted: int | None, together: int = 1
) -> Mapping[str, int]:
    """Factor key -> of how many rows one is enough, where the fewest ranks that can contribute, ``together`` ones, have
    more than those of an update; see :func:`counted`."""
    found = {f.key: int(together * rows.get(f.key, 0.0) // needed(f, wanted)) for f in factors}
    return {key: stride for key, stride in found.items() if stride > 1}


def needed(factor: FactorSpec, wanted: int | None) -> int:
    """Rows of an update."""
    return wanted or ROWS_PER_COLUMN * (factor.side.block if factor.side.block > 1 else factor.side.dim)
