"""Which rank decomposes each factor, and at which step; which ranks precondition each layer; whose
rows a factor sees. Pure; the same on every rank.

The KAISA grid (Pauloski et al. 2021): with W ranks and g gradient workers a layer there are p = W /
g columns; rank r is in column r % p and row r // p. All g ranks of a layer's column precondition
it, and each sends the result to its row, p consecutive ranks, mostly of one node. g = 1 is MEM-OPT,
g = W COMM-OPT.
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

from ds_kfac.assignment.costs import FactorSpec, Work, Workers, basis_bytes, packed_bytes
from ds_kfac.model.convolutions import phase


@dataclass(frozen=True)
class Assignment:
    """Roles of ranks.

    Attributes:
        work: the tasks that are assigned.
        workers: layer name -> ranks that hold its eigenbases and precondition its gradient,
            ascending: one rank under ZeRO, a column of the KAISA grid if gradients are replicated.
        eigen_workers: factor key -> rank that averages and decomposes it; also for factors that
            layers now share.
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
        """Predicted seconds per step of each rank, without work that all ranks do alike."""
        return tuple(self.work.loads(self.workers, self.eigen_workers))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Predicted bytes of K-FAC state of each rank."""
        *state, _ = self.work.bytes_of(self.workers, self.eigen_workers).values()
        return tuple(map(sum, zip(*state, strict=True)))

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Predicted bytes of each rank in a step: its state, and what is beside it."""
        return tuple(
            map(
                sum,
                zip(*self.work.bytes_of(self.workers, self.eigen_workers).values(), strict=True),
            )
        )

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.world / total if total else 1.0


def assign(
    work: Work, workers: int, *, paired: bool = False, memory_cap: float | None = None
) -> Assignment:
    """Assign layers to columns of workers, then factors to eigen workers, the heaviest first, each
    to the least loaded.

    Several plans are made, which balance whole layers or only their preconditioning, with or
    without the sending of replicated results; the one with the smallest maximal load is taken. If
    none respects the cap, bytes are balanced.

    Args:
        workers: gradient workers per layer, a divisor of the world; 1 if gradients are partitioned.
        paired: whether a layer's two factors must be on one rank, not just on any of its workers.
        memory_cap: most bytes of a rank in a step, see :meth:`Work.bytes_of`.

    Raises:
        ValueError: no plan respects the cap.
    """
    assert work.world % workers == 0 and (work.held is None or workers == 1), (
        "a divisor of the world, 1 under ZeRO"
    )
    kinds = (
        ((True, False), (True, True), (False, True))
        if workers > 1 and not paired
        else ((True, False),)
    )
    cap, sends = (
        math.inf if memory_cap is None else memory_cap,
        work.held is None and work.world > workers,
    )
    for by_memory in (False, True):
        found = list[Assignment]()
        movings = (True, False) if sends and not by_memory else (True,)
        for (whole, split), moving in itertools.product(kinds, movings):
            placed = place_workers(
                work, workers, whole=whole, moving=moving, memory_cap=cap, by_memory=by_memory
            )
            homes = place_eigen_workers(
                work, placed, split=split, memory_cap=cap, by_memory=by_memory
            )
            found.append(
                Assignment(work, placed, {factor.key: homes[factor.key] for factor in work.factors})
            )
        if fitting := [plan for plan in found if max(plan.peak) <= cap]:
            return min(fitting, key=lambda plan: (max(plan.loads), sum(plan.loads)))
    smallest = min(max(plan.peak) for plan in found)
    ways = (
        [f"a smaller gradient worker fraction than {workers / work.world:.6g}"]
        if workers > 1
        else []
    )
    ways += ["a smaller factor.dense_max", f"more than {work.world} ranks"]
    raise ValueError(
        f"the memory cap is {cap:.0f} bytes per rank, but the smallest assignment found needs "
        f"{smallest} "
        f"({smallest / 1e9:.3g} GB) for K-FAC's state and a step; raise the cap, or use "
        f"{' or '.join(ways)}"
    )


LOAD_TOLERANCE = 0.1
"""A layer leaves the rank that holds its gradient if that rank's load exceeds the mean by this
fraction."""
NEAR_TIE = 0.99
"""Ranks that hold at least this fraction of the largest part of a gradient count as equal holders
(ZeRO-3's chunks)."""


def place_workers(
    work: Work, workers: int, *, whole: bool, moving: bool, memory_cap: float, by_memory: bool
) -> Workers:
    """Layer name -> its workers.

    If gradients are partitioned, the rank that holds most of a layer's gradient takes the layer,
    unless its load would exceed ``1 + LOAD_TOLERANCE`` times the mean: then the least loaded rank
    does, with the moving of the gradient counted. Near-equal holders compete by load. In the end
    ranks without a layer take one from the busiest.

    Args:
        whole: count a layer's decompositions, evenly over its column, with the layer; else only its
            preconditioning.
        moving: count the sending of replicated results.
        by_memory: balance bytes in place of seconds.
    """
    count, part = work.world // workers, whole / workers
    loads, memory = [0.0] * count, [0.0] * count  # of each rank in a column
    bases: dict[str, set[int]] = {factor.key: set() for factor in work.factors}
    kept = {factor.key: basis_bytes(factor.side, work.method) for factor in work.factors}
    # a layer's seconds and bytes wherever it is placed; a shared factor counts for its layers in
    # equal parts
    weights, sizes = dict[str, float](), dict[str, float]()
    for layer in work.layers:
        used = [(factor, len(factor.layers)) for factor in work.used[layer.name]]
        shares = sum(part * work.factor[factor.key] / users for factor, users in used)
        weights[layer.name] = work.precondition[layer.name] + shares
        nbytes = sum(
            (kept[factor.key] + part * 2 * packed_bytes(factor.side)) / users
            for factor, users in used
        )
        sizes[layer.name] = sum(work.worker_bytes(layer)) + nbytes
    limit = (1 + LOAD_TOLERANCE) * sum(weights.values()) / count
    heaviest = sizes if by_memory else weights
    placed: dict[str, int] = {}
    # stable: module order
    for layer in sorted(work.layers, key=lambda layer: heaviest[layer.name], reverse=True):
        state, after = sum(work.worker_bytes(layer)), []
        sent = work.moved(layer, 0, workers) if moving and work.held is None else 0.0
        for i in range(count):
            moved = sent if work.held is None else work.moved(layer, i)
            seconds, nbytes = work.precondition[layer.name] + moved, memory[i] + state
            for factor in work.used[layer.name]:
                if not (there := bases[factor.key]):
                    seconds += part * work.factor[factor.key]
                    nbytes += kept[factor.key] + part * 2 * packed_bytes(factor.side)
                elif i not in there:  # a rank that has a shared basis pays nothing more
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
    return {
        layer.name: column(placed[layer.name], world=work.world, workers=workers)
        for layer in work.layers
    }


def _employ_idle(placed: dict[str, int], loads: list[float], weights: Mapping[str, float]) -> None:
    for idle in (index for index, load in enumerate(loads) if load == 0):
        counts = Counter(placed.values())
        donor = max(
            (i for i in range(len(loads)) if counts[i] >= 2), key=loads.__getitem__, default=None
        )
        if donor is None:
            return
        name = min(
            (name for name, index in placed.items() if index == donor), key=weights.__getitem__
        )
        placed[name] = idle
        loads[donor] -= weights[name]
        loads[idle] += weights[name]


def place_eigen_workers(
    work: Work, workers: Workers, *, split: bool, memory_cap: float, by_memory: bool
) -> Mapping[str, int]:
    """Factor key -> eigen worker: one of the layer's workers; for a shared factor, of any of its
    layers. With ``split`` a layer's A and G may be on two ranks, if that pays."""
    loads, memory = work.loads(workers, {}), list(Assignment(work, workers, {}).peak)
    eigen_workers: dict[str, int] = {}

    def seconds(item: tuple[FactorSpec, ...]) -> float:
        return sum(work.factor[factor.key] for factor in item)

    def size(item: tuple[FactorSpec, ...]) -> float:
        return sum(2 * packed_bytes(factor.side) for factor in item)

    # stable
    for item in sorted(_items(work, split), key=size if by_memory else seconds, reverse=True):
        of_each = [work.users(factor, workers) for factor in item]
        users, candidates = set.union(*of_each), sorted(set.intersection(*of_each))
        fits = [rank for rank in candidates if memory[rank] + size(item) <= memory_cap]
        if fits and not by_memory:
            rank = _soonest(
                fits, loads, users, seconds(item), sum(work.travel(factor) for factor in item)
            )
        else:
            rank = min(fits or candidates, key=lambda rank: (memory[rank], rank))
        memory[rank] += int(size(item))
        for factor, its_users in zip(item, of_each, strict=True):
            eigen_workers[factor.key] = rank
            work.decompose(loads, factor, rank, its_users)
    return eigen_workers


def _items(work: Work, split: bool) -> list[tuple[FactorSpec, ...]]:
    """Factors that one rank decomposes together: a layer's two, unless they may be split."""
    home: dict[str, str] = {}
    if not split:
        for used in work.used.values():
            keys = [factor.key for factor in used if len(factor.layers) == 1]
            home |= dict.fromkeys(keys, next(iter(keys), ""))
    items: dict[str, list[FactorSpec]] = {}
    for factor in work.factors:
        items.setdefault(home.get(factor.key, factor.key), []).append(factor)
    return [tuple(item) for item in items.values()]


def _soonest(
    among: list[int], loads: list[float], users: set[int], seconds: float, travel: float
) -> int:
    """The rank among some users with which the largest load of eigen worker and users becomes
    smallest; of equals, the least loaded. ``travel``: seconds that each end spends on one copy of
    the eigenbases."""
    first, second = heapq.nlargest(2, [*((loads[rank], rank) for rank in users), (0.0, -1)])

    def outcome(rank: int) -> tuple[float, float, int]:
        busiest = (second if first[1] == rank else first)[0]  # of the users that receive
        after = loads[rank] + seconds + (len(users) - 1) * travel
        return max(after, busiest + travel), after, rank

    return min(among, key=outcome)


ROUNDING = 0.01
"""A fraction within this relative distance of a valid one is taken for that, such as 0.33 of 3
ranks."""


def worker_counts(world: int) -> tuple[int, ...]:
    """All valid g: the divisors of ``world``, ascending."""
    return tuple(count for count in range(1, world + 1) if world % count == 0)


def workers_for(fraction: float, world: int) -> int:
    """g = max(1, fraction W). Raises ValueError if g does not divide W, with the nearest
    fractions."""
    wanted = max(1.0, fraction * world)
    counts = worker_counts(world)
    nearest = min(counts, key=lambda count: abs(count - wanted))
    if abs(nearest - wanted) <= ROUNDING * wanted:
        return nearest
    above = bisect_right(counts, wanted)
    options = " or ".join(
        f"{count / world:.6g} (g = {count})" for count in counts[above - 1 : above + 1]
    )
    raise ValueError(
        f"kfac.assignment.gradient_worker_fraction: got {fraction}, which is {wanted:.6g} of "
        f"{world} ranks; the number "
        f"of workers must divide {world}: {options}"
    )


def column(index: int, *, world: int, workers: int) -> tuple[int, ...]:
    """Ranks of a column, ascending, one per row."""
    return tuple(range(index, world, world // workers))


CAPTURE_TOLERANCE = 0.1
"""Fraction by which a rank's captures at a step may exceed their mean, for the sake of an even
refresh."""


def refresh_offsets(
    factors: Sequence[FactorSpec],
    eigen_workers: Mapping[str, int],
    work: Work,
    *,
    alone: bool = False,
) -> tuple[Mapping[str, int], float]:
    """Spread refreshes over steps. Returns factor key -> the step, modulo the refresh interval, of
    its refresh, which modulo the update interval is that of its captures; and the seconds of the
    slowest rank at the slowest step.

    The heaviest factor first, each goes to the step whose slowest rank it delays least: a step
    takes as long as that rank, so work goes where another rank is as busy anyway, else to the
    emptiest step. Ranks of a node that share ``node_cores`` cores also delay each other. Captures
    at a step, D^2 each, stay near their mean on every rank; but on a GPU, where the launches of a
    step with any capture take longer than its work, all are in the same steps, and refreshes at
    some of these. Other factors of ``work`` are at step 0. If the refresh interval is no multiple
    of the update interval, the steps past its largest multiple stay empty. ``alone``: a factor is
    captured by its eigen worker and a few ranks, not by all.
    """
    costs, refresh, update = work.costs, work.refresh_interval, work.update_interval
    steps = refresh // update * update or refresh
    together = costs.gpu and steps >= 2 * update  # all captures in the same steps
    captures, apart = (1, update) if together else (min(update, steps), 1)
    seconds = {
        factor.key: costs.decompose(factor.side, work.method)
        for factor in (*work.factors, *factors)
    }
    squares = {factor.key: factor.side.dim**2 for factor in factors}
    who = {key: eigen_workers[key] if alone else None for key in squares}  # None: all ranks
    everything = Counter[int | None]()
    for key, square in squares.items():
        everything[who[key]] += square
    most = max(everything.values(), default=0)
    limit = max(*squares.values(), (1 + CAPTURE_TOLERANCE) * most / captures, 0)
    captured = [Counter[int | None]() for _ in range(captures)]
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
            for step in (
                step for step in range(0, steps, apart) if after_it[step % captures] <= fewest
            ):
                # differences make an idle step and one after the slowest rank's work compare as
                # exactly equal
                longer = max(
                    0.0,
                    *(
                        more - (length[step] - busy[step].get(part, 0.0))
                        for part, more in parts.items()
                    ),
                )
                after = length[step] + longer
                outcomes.append((max(worst, after), longer, after, after_it[step % captures], step))
            step = offsets[key] = min(outcomes)[-1]
            captured[step % captures][who[key]] += squares[key]
        for part, more in parts.items():
            busy[step][part] = busy[step].get(part, 0.0) + more
            length[step] = max(length[step], busy[step][part])
    return offsets, max(length)


ROWS_PER_COLUMN = 4
"""Rows of an update per column of a factor, unless the config says otherwise."""


@dataclass(frozen=True)
class Contributors:
    """Which of ``world`` ranks capture a factor's batch; ``node_size`` consecutive ranks are a
    node.

    Attributes:
        counts: factor key -> number of contributors to an update; a missing factor has all ranks.
        strides: factor key -> k, if a contributor counts every k-th of its rows; else it counts
            all.
        sequence: number of consecutive ranks that hold the parts of one sequence. All of them
            contribute or none, else a factor would always see the same part of sequences.
    """

    world: int
    node_size: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    sequence: int = 1
    strides: Mapping[str, int] = field(default_factory=dict)

    def of(self, key: str, owner: int, step: int) -> Sequence[int]:
        """Ranks that contribute to a factor at ``step``, ascending. The eigen worker ``owner``'s
        node comes first."""
        count, everyone = self.counts.get(key, self.world), range(self.world)
        if count >= self.world:
            return everyone
        if (parts := self.sequence) > 1:
            whole = Contributors(
                self.world // parts, max(1, self.node_size // parts), {key: -(-count // parts)}
            )
            sequences = whole.of(key, owner // parts, step)
            return tuple(parts * sequence + part for sequence in sequences for part in range(parts))
        start = owner - owner % self.node_size
        node = range(start, min(start + self.node_size, self.world))
        ranks = [
            owner,
            *_rotating([rank for rank in node if rank != owner], count - 1, owner, step),
        ]
        if len(ranks) < count:
            others = [rank for rank in everyone if rank not in node]
            ranks += _rotating(others, count - len(ranks), owner, step)
        return tuple(sorted(ranks))


def _rotating(ranks: Sequence[int], count: int, owner: int, step: int) -> list[int]:
    """At most ``count`` of the ranks, starting at a place that depends on step and owner, so that
    all take turns."""
    if count >= len(ranks):
        return list(ranks)
    first = owner + phase(step, len(ranks))
    return [ranks[(first + place) % len(ranks)] for place in range(count)]


def counted(
    factors: Sequence[FactorSpec], rows: Mapping[str, float], world: int, *, wanted: int | None
) -> Mapping[str, int]:
    """Factor key -> number of ranks that together have the rows of an update; all ranks for missing
    factors.

    A factor averages many updates, each of which needs a few rows per column, whatever the number
    of ranks. So the cost of statistics on a rank falls with the number of ranks.

    Args:
        rows: factor key -> rows of a rank in a step, if known.
        wanted: rows of an update; None: in proportion to the widest block.
    """
    counts = {}
    for factor in factors:
        here = rows.get(factor.key, 0.0)
        if here > 0 and (count := max(1, int(-(-needed(factor, wanted) // here)))) < world:
            counts[factor.key] = count
    return counts


def strides(
    factors: Sequence[FactorSpec],
    rows: Mapping[str, float],
    *,
    wanted: int | None,
    together: int = 1,
) -> Mapping[str, int]:
    """Factor key -> of how many rows one is enough, where the fewest ranks that can contribute,
    ``together`` ones, have more than those of an update; see :func:`counted`."""
    found = {f.key: int(together * rows.get(f.key, 0.0) // needed(f, wanted)) for f in factors}
    return {key: stride for key, stride in found.items() if stride > 1}


def needed(factor: FactorSpec, wanted: int | None) -> int:
    """Rows that an update of a factor needs."""
    return wanted or ROWS_PER_COLUMN * (
        factor.side.block if factor.side.block > 1 else factor.side.dim
    )
