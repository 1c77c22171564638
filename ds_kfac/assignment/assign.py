"""Decide which rank decomposes each factor and at which step, which ranks precondition each layer,
and which ranks contribute rows to a factor. The functions are pure, so every rank decides the same.

Note: The KAISA grid (Pauloski et al. 2021). With W ranks and g gradient workers per layer, the grid
has p = W / g columns. Rank r is in column r % p and row r // p. The g ranks of one column
precondition a layer. Each of them sends the result to the other ranks of its row. A row consists of
p consecutive ranks, which are mostly on one node. g = 1 is MEM-OPT, and g = W is COMM-OPT.
"""

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ds_kfac.assignment.costs import FactorSpec, Work, Workers, basis_bytes, packed_bytes
from ds_kfac.model.convolutions import phase
from ds_kfac.model.layers import LayerSpec


@dataclass(frozen=True)
class Assignment:
    """Assignment of the tasks of a step to ranks.

    Attributes:
        work: the tasks that are assigned.
        workers: layer name -> ranks that have the layer's eigenbases and precondition its gradient,
            in ascending order. If gradients are partitioned (ZeRO), each layer has one such rank.
            If gradients are replicated, the ranks form a column of the KAISA grid.
        owners: factor key -> rank that averages and decomposes the factor. The dict may also
            have keys of factors that no longer exist, because a shared factor has replaced them.
    """

    work: Work
    workers: Workers
    owners: Mapping[str, int]

    @property
    def world(self) -> int:
        return self.work.world

    @property
    def factors(self) -> Sequence[FactorSpec]:
        return self.work.factors

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Predicted seconds of work per step for each rank. Work that is the same on all ranks is
        left out."""
        return tuple(self.work.loads(self.workers, self.owners))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Predicted bytes of K-FAC state on each rank."""
        *state, _ = self.work.bytes_of(self.workers, self.owners).values()
        return tuple(map(sum, zip(*state, strict=True)))

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Predicted bytes on each rank during a step: K-FAC's state and the step's temporaries."""
        parts = self.work.bytes_of(self.workers, self.owners).values()
        return tuple(map(sum, zip(*parts, strict=True)))

    @property
    def imbalance(self) -> float:
        """Largest load divided by the mean load. 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.world / total if total else 1.0


def assign(
    work: Work, workers: int, *, paired: bool = False, memory_cap: float | None = None
) -> Assignment:
    """Assign layers to columns of workers, and then factors to owners. The heaviest layer is
    assigned first. Each layer goes to the column whose load is smallest after the layer is added.
    Factors are assigned to ranks in the same way.

    Several assignments are tried. They differ in whether the load of a layer includes its
    decompositions, and in whether one rank must decompose both A and G of a layer. The assignment
    with the smallest maximal load is returned. If none respects the memory cap, assignments that
    balance bytes instead of seconds are tried.

    Args:
        workers: number of gradient workers per layer, a divisor of the world size. It is 1 if
            gradients are partitioned.
        paired: whether a layer's two factors must be on the same rank. If False, each may be on any
            of the layer's workers.
        memory_cap: limit on the bytes that a rank uses during a step, which :attr:`Assignment.peak`
            predicts; None: no limit.

    Raises:
        ValueError: no assignment respects the cap.
    """
    assert work.world % workers == 0 and (work.held is None or workers == 1), (
        "a divisor of the world, 1 under ZeRO"
    )
    # (with_decompositions, split), see place_workers and place_owners
    variants = [(True, False)]
    if workers > 1 and not paired:
        variants += [(True, True), (False, True)]
    cap = math.inf if memory_cap is None else memory_cap
    for by_memory in (False, True):
        candidates: list[Assignment] = []
        for with_decompositions, split in variants:
            placed = place_workers(
                work,
                workers,
                with_decompositions=with_decompositions,
                memory_cap=cap,
                by_memory=by_memory,
            )
            owners = place_owners(work, placed, split=split, memory_cap=cap, by_memory=by_memory)
            in_order = {factor.key: owners[factor.key] for factor in work.factors}
            candidates.append(Assignment(work, placed, in_order))
        fitting = [assignment for assignment in candidates if max(assignment.peak) <= cap]
        if fitting:
            return min(fitting, key=lambda plan: (max(plan.loads), sum(plan.loads)))
    smallest = min(max(assignment.peak) for assignment in candidates)
    ways = ["a smaller factor.dense_max", f"more than {work.world} ranks"]
    if workers > 1:
        ways.insert(0, f"a smaller gradient worker fraction than {workers / work.world:.6g}")
    raise ValueError(
        f"the memory cap is {cap:.0f} bytes per rank, but the smallest assignment found needs "
        f"{smallest} ({smallest / 1e9:.3g} GB) for K-FAC's state and a step: raise the cap, or use "
        f"{' or '.join(ways)}"
    )


LOAD_TOLERANCE = 0.1
"""A layer may stay on the rank that holds its gradient as long as that rank's load exceeds the mean
by at most this fraction."""
NEAR_TIE = 0.99
"""ZeRO-3 splits a gradient into nearly equal chunks. A rank counts as one of the ranks that hold
most of the gradient if its chunk has at least this fraction of the largest chunk's size."""


class _Load(NamedTuple):
    """Load of one rank: work in seconds per step, and memory in bytes. The ranks of a column are
    assumed to have equal loads."""

    seconds: float
    nbytes: float

    def compared(self, by_bytes: bool) -> float:
        """Return the bytes if loads are compared by bytes, otherwise the seconds."""
        return self.nbytes if by_bytes else self.seconds


def place_workers(
    work: Work, workers: int, *, with_decompositions: bool, memory_cap: float, by_memory: bool
) -> Workers:
    """Return a dict from layer name to the layer's workers, which form a column of the grid.

    The heaviest layer is placed first. Each layer goes to the column whose load is smallest after
    the layer is added.

    If gradients are partitioned, a layer goes to the rank that holds most of its gradient, because
    then the fewest elements have to be moved. If several ranks hold nearly equal parts, the least
    loaded of these ranks is chosen. If that rank's load would exceed ``1 + LOAD_TOLERANCE`` times
    the mean, the layer goes to the rank with the least load instead. Moving the gradient counts as
    load.

    Args:
        with_decompositions: whether a layer's load includes its decompositions, spread evenly over
            the ranks of its column. If False, the load consists of preconditioning only.
        by_memory: whether to balance bytes instead of seconds.
    """
    count = work.world // workers
    # the fraction of a layer's decompositions that each rank of its column computes
    part = with_decompositions / workers
    loads = [_Load(0.0, 0.0)] * count  # per column, the load of one rank
    columns_with_basis: dict[str, set[int]] = {factor.key: set() for factor in work.factors}
    kept = {factor.key: basis_bytes(factor.side, work.method) for factor in work.factors}
    # The part of a layer's cost that does not depend on where the layer is placed. The cost of a
    # shared factor is divided equally among its layers.
    weights: dict[str, _Load] = {}
    for layer in work.layers:
        used = [(factor, len(factor.layers)) for factor in work.used[layer.name]]
        shares = sum(part * work.factor[factor.key] / users for factor, users in used)
        factor_bytes = sum(
            (kept[factor.key] + part * 2 * packed_bytes(factor.side)) / users
            for factor, users in used
        )
        weights[layer.name] = _Load(
            work.precondition[layer.name] + shares, sum(work.worker_bytes(layer)) + factor_bytes
        )
    limit = (1 + LOAD_TOLERANCE) * sum(weight.seconds for weight in weights.values()) / count

    def load_with(layer: LayerSpec, index: int, moved: float, state_bytes: float) -> _Load:
        """Return the load that a rank of the column has if the layer is assigned to the column."""
        seconds = work.precondition[layer.name] + moved
        nbytes = loads[index].nbytes + state_bytes
        for factor in work.used[layer.name]:
            columns = columns_with_basis[factor.key]
            if not columns:
                seconds += part * work.factor[factor.key]
                nbytes += kept[factor.key] + part * 2 * packed_bytes(factor.side)
            elif index not in columns:  # a column needs a shared basis only once
                seconds += work.travel(factor)
                nbytes += kept[factor.key]
        return _Load(loads[index].seconds + seconds, nbytes)

    placed: dict[str, int] = {}
    heaviest_first = sorted(  # equally heavy layers stay in the order of the modules
        work.layers, key=lambda layer: weights[layer.name].compared(by_memory), reverse=True
    )
    for layer in heaviest_first:
        state_bytes = sum(work.worker_bytes(layer))
        if work.held is None:
            moved = [work.moved(layer, 0, workers)] * count
        else:
            moved = [work.moved(layer, index) for index in range(count)]
        after = [load_with(layer, i, moved[i], state_bytes) for i in range(count)]
        fitting = [i for i in range(count) if after[i].nbytes <= memory_cap]
        by_bytes = by_memory or not fitting
        index = min(fitting or range(count), key=lambda i: after[i].compared(by_bytes))
        if work.held is not None and not by_memory:
            held = work.held[layer.name]
            holders = [i for i in fitting if held[i] >= NEAR_TIE * max(held)]
            holder = min(holders, key=lambda i: loads[i].seconds, default=None)
            if holder is not None and after[holder].seconds <= limit:
                index = holder
        loads[index] = after[index]
        for factor in work.used[layer.name]:
            columns_with_basis[factor.key].add(index)
        placed[layer.name] = index
    return {
        layer.name: column(placed[layer.name], world=work.world, workers=workers)
        for layer in work.layers
    }


def place_owners(
    work: Work, workers: Workers, *, split: bool, memory_cap: float, by_memory: bool
) -> Mapping[str, int]:
    """Return a dict from factor key to the factor's owner.

    The owner is one of the layer's workers. If layers share the factor, it is a worker of
    any of these layers.

    Args:
        split: whether a layer's A and G may have different owners if that is faster.
        by_memory: whether to balance bytes instead of seconds.
    """
    loads = work.loads(workers, {})
    memory = list(Assignment(work, workers, {}).peak)
    owners: dict[str, int] = {}

    def seconds(factors: tuple[FactorSpec, ...]) -> float:
        return sum(work.factor[factor.key] for factor in factors)

    def size(factors: tuple[FactorSpec, ...]) -> float:
        return sum(2 * packed_bytes(factor.side) for factor in factors)

    heaviest_first = sorted(  # equally heavy groups stay in order
        _decomposed_together(work, split), key=size if by_memory else seconds, reverse=True
    )
    for factors in heaviest_first:
        users_of = [work.users(factor, workers) for factor in factors]
        all_users = set.union(*users_of)
        candidates = sorted(set.intersection(*users_of))
        fitting = [rank for rank in candidates if memory[rank] + size(factors) <= memory_cap]
        if fitting and not by_memory:
            travel = sum(work.travel(factor) for factor in factors)
            rank = _soonest(fitting, loads, all_users, seconds(factors), travel)
        else:
            rank = min(fitting or candidates, key=lambda rank: (memory[rank], rank))
        memory[rank] += int(size(factors))
        for factor, users in zip(factors, users_of, strict=True):
            owners[factor.key] = rank
            work.decompose(loads, factor, rank, users)
    return owners


def _decomposed_together(work: Work, split: bool) -> list[tuple[FactorSpec, ...]]:
    """Return the factors in groups. One rank decomposes all factors of a group. A layer's A and G
    form a group, unless they may be split or one of them is shared."""
    first_key: dict[str, str] = {}
    if not split:
        for used in work.used.values():
            keys = [factor.key for factor in used if len(factor.layers) == 1]
            first_key |= dict.fromkeys(keys, next(iter(keys), ""))
    groups: dict[str, list[FactorSpec]] = {}
    for factor in work.factors:
        groups.setdefault(first_key.get(factor.key, factor.key), []).append(factor)
    return [tuple(group) for group in groups.values()]


def _soonest(
    candidates: list[int], loads: list[float], users: set[int], seconds: float, travel: float
) -> int:
    """Return the owner that makes the largest load of any user as small as possible. If several
    candidates achieve this, return the one with the least load.

    Args:
        candidates: ranks that may be chosen. They must be among the users.
        users: ranks that need the eigenbases.
        seconds: time of the decompositions.
        travel: time that sender and receiver each spend on one copy of the eigenbases.
    """
    first, second = heapq.nlargest(2, [*((loads[rank], rank) for rank in users), (0.0, -1)])

    def outcome(rank: int) -> tuple[float, float, int]:
        busiest_receiver, _ = second if first[1] == rank else first
        after = loads[rank] + seconds + (len(users) - 1) * travel
        return max(after, busiest_receiver + travel), after, rank

    return min(candidates, key=outcome)


ROUNDING = 0.01
"""A gradient worker fraction is rounded to the nearest valid fraction if their relative difference
is at most this number. For example, 0.33 with 3 ranks means 1/3."""


def worker_counts(world: int) -> tuple[int, ...]:
    """Return all valid numbers g of gradient workers in ascending order. These are the divisors of
    ``world``."""
    return tuple(count for count in range(1, world + 1) if world % count == 0)


def workers_for(fraction: float, world: int) -> int:
    """Return the number of gradient workers g = max(1, fraction * W), where W is ``world``. If g
    does not divide W, raise ValueError, which names the nearest valid fractions."""
    wanted = max(1.0, fraction * world)
    counts = worker_counts(world)
    nearest = min(counts, key=lambda count: abs(count - wanted))
    if abs(nearest - wanted) <= ROUNDING * wanted:
        return nearest
    above = bisect_right(counts, wanted)
    options = " or ".join(
        f"{count / world:.6g} ({count} of {world} ranks)" for count in counts[above - 1 : above + 1]
    )
    raise ValueError(
        f"kfac.assignment.gradient_worker_fraction: got {fraction}, which is {wanted:.6g} of "
        f"{world} ranks; the number of workers must divide {world}: set {options}"
    )


def column(index: int, *, world: int, workers: int) -> tuple[int, ...]:
    """Return the ranks of a column in ascending order, one for each row of the grid."""
    return tuple(range(index, world, world // workers))


CAPTURE_TOLERANCE = 0.1
"""Fraction by which the cost of a rank's captures in one step may exceed the mean over steps, so
that refreshes can be spread evenly."""


def refresh_offsets(
    factors: Sequence[FactorSpec],
    owners: Mapping[str, int],
    work: Work,
    *,
    alone: bool = False,
) -> tuple[Mapping[str, int], float]:
    """Spread the refreshes of factors over the steps of a refresh interval.

    The heaviest factor is placed first. Each factor goes to the step that keeps the longest step of
    the interval shortest. Of several such steps, it goes to the one that it delays least, and if
    several remain, to the shortest of them. A step takes as long as its slowest rank. So a refresh
    does not delay a step in which another rank is busy for at least as long. Ranks of a node that
    share ``node_cores`` cores also delay each other.

    The cost of capturing a factor with D columns is taken to be D^2. On every rank, the captures of
    a step may cost only a little more than the mean over steps. GPUs are an exception, because
    there it takes longer to launch the kernels of a capture than to run them. On GPUs, all factors
    are captured in the same steps, and all are refreshed in a subset of these steps.

    Factors of ``work`` that are not in ``factors`` are refreshed at step 0. Refreshes are spread
    over the first n steps of the refresh interval, where n is the interval's length, rounded down
    to a multiple of the update interval.

    Args:
        factors: the factors to spread.
        alone: whether only the owner and a few other ranks capture a factor. If False, all
            ranks capture it.

    Returns two values. The first is a dict from factor key to the offset of the factor's refreshes,
    which is a step modulo the refresh interval. This offset modulo the update interval is the
    offset of the factor's captures. The second value is the time of the slowest rank in the slowest
    step, in seconds.
    """
    costs = work.costs
    refresh = work.refresh_interval
    update = work.update_interval
    steps = refresh // update * update or refresh
    if costs.gpu and steps >= 2 * update:  # all captures are in the same steps
        capture_steps = 1
        distance = update
    else:
        capture_steps = min(update, steps)
        distance = 1
    seconds = {
        factor.key: costs.decompose(factor.side, work.method)
        for factor in (*work.factors, *factors)
    }
    squares = {factor.key: factor.side.dim**2 for factor in factors}
    capturer = {key: owners[key] if alone else None for key in squares}  # None: all ranks
    total_captured = Counter[int | None]()
    for key, square in squares.items():
        total_captured[capturer[key]] += square
    most_captured = max(total_captured.values(), default=0)
    even_share = (1 + CAPTURE_TOLERANCE) * most_captured / capture_steps
    capture_limit = max(*squares.values(), even_share, 0)
    captured = [Counter[int | None]() for _ in range(capture_steps)]
    timeline = _Timeline(steps)
    offsets = dict.fromkeys(squares, 0)
    heaviest_first = sorted(squares, key=lambda key: (-seconds[key], -squares[key]))
    at_step_0 = [factor.key for factor in work.factors if factor.key not in squares]
    for key in (*at_step_0, *heaviest_first):
        rank = owners[key]
        work_of: dict[Hashable, float] = {rank: seconds[key]}
        if costs.node_cores:
            work_of["node", rank // costs.node_size] = seconds[key] / costs.node_cores
        step = 0
        if key in squares:
            captured_with = [now[capturer[key]] + squares[key] for now in captured]
            allowed = max(capture_limit, min(captured_with))
            longest = max(timeline.length)
            outcomes = []
            for candidate in range(0, steps, distance):
                capture = captured_with[candidate % capture_steps]
                if capture > allowed:
                    continue
                delay = timeline.delay(candidate, work_of)
                after = timeline.length[candidate] + delay
                outcomes.append((max(longest, after), delay, after, capture, candidate))
            *_, step = min(outcomes)
            offsets[key] = step
            captured[step % capture_steps][capturer[key]] += squares[key]
        timeline.add(step, work_of)
    return offsets, max(timeline.length)


class _Timeline:
    """The time that each step takes.

    A worker is a rank, or the cores that the ranks of a node share.

    Attributes:
        busy: for each step, a dict from worker to its seconds of work.
        length: for each step, the busiest worker's seconds of work.
    """

    def __init__(self, steps: int) -> None:
        self.busy: list[dict[Hashable, float]] = [{} for _ in range(steps)]
        self.length = [0.0] * steps

    def delay(self, step: int, seconds: Mapping[Hashable, float]) -> float:
        """Return by how many seconds a step would become longer if its workers got more work.

        This is the largest difference between a worker's additional work and its idle time. For a
        worker without idle time, the difference is exactly the additional work, without rounding.
        """
        longer = 0.0
        for worker, more in seconds.items():
            idle = self.length[step] - self.busy[step].get(worker, 0.0)
            longer = max(longer, more - idle)
        return longer

    def add(self, step: int, seconds: Mapping[Hashable, float]) -> None:
        """Add seconds of work to the workers of a step."""
        busy = self.busy[step]
        for worker, more in seconds.items():
            busy[worker] = busy.get(worker, 0.0) + more
            self.length[step] = max(self.length[step], busy[worker])


ROWS_PER_COLUMN = 4
"""Number of rows per column of a factor that an update needs, unless the config sets a number of
rows."""


@dataclass(frozen=True)
class Contributors:
    """The ranks that capture rows for each factor.

    Attributes:
        world: number of ranks.
        node_size: number of consecutive ranks on a node.
        counts: factor key -> number of ranks that contribute to an update. All ranks contribute to
            a factor without an entry.
        strides: factor key -> k. Of each contributor's rows, only every k-th counts. All rows count
            for a factor without an entry.
        sequence: number of consecutive ranks that hold the parts of one sequence. Either all of
            these ranks contribute or none, because otherwise a factor would always see the same
            part of each sequence.
    """

    world: int
    node_size: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    sequence: int = 1
    strides: Mapping[str, int] = field(default_factory=dict)

    def of(self, key: str, owner: int, step: int) -> Sequence[int]:
        """Return the ranks that contribute to a factor at ``step``, in ascending order. The
        factor's owner is chosen first, then ranks of its node, then all other ranks."""
        count = self.counts.get(key, self.world)
        if count >= self.world:
            return range(self.world)
        parts = self.sequence
        if parts > 1:
            # sequences are chosen in the same way as ranks
            sequences_on_node = max(1, self.node_size // parts)
            by_sequence = Contributors(
                self.world // parts, sequences_on_node, {key: -(-count // parts)}
            )
            sequences = by_sequence.of(key, owner // parts, step)
            return tuple(parts * sequence + part for sequence in sequences for part in range(parts))
        start = owner - owner % self.node_size
        node = range(start, min(start + self.node_size, self.world))
        neighbours = [rank for rank in node if rank != owner]
        ranks = [owner, *_rotating(neighbours, count - 1, owner, step)]
        if len(ranks) < count:
            others = [rank for rank in range(self.world) if rank not in node]
            ranks += _rotating(others, count - len(ranks), owner, step)
        return tuple(sorted(ranks))


def _rotating(ranks: Sequence[int], count: int, owner: int, step: int) -> list[int]:
    """Return ``count`` of the ranks, or all ranks if there are fewer. The first rank that is chosen
    depends on the step and the owner, so that all ranks take turns."""
    if count >= len(ranks):
        return list(ranks)
    first = owner + phase(step, len(ranks))
    return [ranks[(first + place) % len(ranks)] for place in range(count)]


def counted(
    factors: Sequence[FactorSpec], rows: Mapping[str, float], world: int, *, wanted: int | None
) -> Mapping[str, int]:
    """Return a dict from factor key to the number of ranks that together have as many rows as an
    update needs. Factors that need the rows of all ranks are left out.

    A factor averages many updates, and each update needs a few rows per column, regardless of the
    number of ranks. With more ranks, a rank therefore captures fewer factors per step on average.

    Args:
        rows: factor key -> mean number of rows that a rank has in a step. Factors whose rows have
            not been observed are left out.
        wanted: number of rows that an update needs. None means :data:`ROWS_PER_COLUMN` times the
            width of the factor's blocks, or of the whole side if the factor is diagonal.
    """
    counts: dict[str, int] = {}
    for factor in factors:
        rows_of_rank = rows.get(factor.key, 0.0)
        if rows_of_rank <= 0:
            continue
        count = max(1, int(-(-needed(factor, wanted) // rows_of_rank)))
        if count < world:
            counts[factor.key] = count
    return counts


def strides(
    factors: Sequence[FactorSpec],
    rows: Mapping[str, float],
    *,
    wanted: int | None,
    together: int = 1,
) -> Mapping[str, int]:
    """Return a dict from factor key to k, for each factor that needs only every k-th row. Factors
    that need all rows are left out.

    Args:
        rows, wanted: see :func:`counted`.
        together: smallest number of ranks that can contribute to a factor, which is
            ``Contributors.sequence``.
    """
    made: dict[str, int] = {}
    for factor in factors:
        rows_of_ranks = together * rows.get(factor.key, 0.0)
        stride = int(rows_of_ranks // needed(factor, wanted))
        if stride > 1:
            made[factor.key] = stride
    return made


def needed(factor: FactorSpec, wanted: int | None) -> int:
    """Return the number of rows that an update of a factor needs."""
    side = factor.side
    return wanted or ROWS_PER_COLUMN * (side.block if side.block > 1 else side.dim)
