"""Factors to decomposers: heaviest first, to the rank that is least loaded with it, its eigenbasis' travel included."""

import heapq
from collections.abc import Mapping
from itertools import chain

from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.assignment.work import Work, packed_bytes

Workers = Mapping[str, tuple[int, ...]]


def place_decomposers(
    work: Work, workers: Workers, *, split: bool, memory_cap: float | None, by_memory: bool
) -> Mapping[str, int]:
    """Factor key -> decomposer.

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
    """Where the largest load among decomposer and users ends up smallest; then the least loaded; then a user.

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
