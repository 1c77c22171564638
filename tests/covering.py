"""A few cases of a table in which every pair of its factors' values occurs: two-way covering,
chosen greedily."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case")
Pair = tuple[tuple[str, Hashable], ...]


def pairs(factors: dict[str, Hashable]) -> set[Pair]:
    """What one case covers: its values of every two factors."""
    return set(combinations(sorted(factors.items(), key=lambda item: item[0]), 2))


def covering(
    cases: Sequence[Case],
    factors: Callable[[Case], dict[str, Hashable]],
    always: Callable[[Case], Iterable[Hashable]] = lambda case: (),
) -> list[Case]:
    """Some of ``cases``, in their order, that cover all that the whole of them covers. The same in
    every process.

    Args:
        factors: of a case, name -> value; every case has the same names.
        always: what else a case covers, beside pairs.
    """
    open_ = [pairs(factors(case)) | {("always", each) for each in always(case)} for case in cases]
    missing, chosen = set().union(*open_), []
    while missing:
        # the first one of the best
        best = max(range(len(cases)), key=lambda index: len(open_[index] & missing))
        chosen.append(best)
        missing -= open_[best]
    return [cases[index] for index in sorted(chosen)]


def some(cases: Iterable[Case], world: int) -> list[Case]:
    """All on one rank; on three or four, one of each pair, by turns the first and the second; on
    two, the others."""
    return [
        case
        for index, case in enumerate(cases)
        if world == 1 or (index + index // 2) % 2 == (world == 2)
    ]
