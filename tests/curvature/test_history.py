"""SP-NGD's rule, and the comparison of factors that feeds it."""

from copy import deepcopy

import pytest
import torch

from ds_kfac.curvature.factor import (
    PIECE,
    History,
    Side,
    compare_,
    frobenius,
)
from ds_kfac.schedule.timetable import next_interval
from tests.close import close

SIDES = [Side.dense(1), Side.dense(63), Side(63, 20), Side.diagonal(9)]


def intervals(flags: list[tuple[bool, bool]]) -> list[int]:
    interval, previous, seen = 1, 1, []
    for similar in flags:
        interval, previous = next_interval(interval, previous, *similar)
        seen.append(interval)
    return seen


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ([(True, True)] * 6, [2, 3, 5, 8, 13, 21]),
        ([(False, True)] * 5, [1] * 5),
        ([(False, False)] * 5, [1] * 5),
        (
            [(True, True)] * 4 + [(True, False)] * 2 + [(False, False)] * 5,
            [2, 3, 5, 8, 8, 8, 4, 2, 1, 1, 1],
        ),
    ],
    ids=["stays", "changes", "always new", "a change halves and a small one waits"],
)
def test_intervals_grow_like_fibonacci_while_a_factor_stays_and_halve_where_it_changes(flags, seen):
    assert intervals(flags) == seen


def packed(side: Side, seed: int) -> torch.Tensor:
    x = torch.randn(2 * side.dim + 1, side.dim, generator=torch.Generator().manual_seed(seed))
    return side.accumulate_(torch.zeros(side.numel), x)


def whole(side: Side, kept: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*(block for group in side.blocks(kept) for block in group)).double()


def filled(side: Side, *values: torch.Tensor) -> History:
    """After ``values``, in that order."""
    history = History.of(side)
    for value in values:
        compare_([history], [value], tolerance=0.1)
    return history


def flags(history: History, new: torch.Tensor, tolerance: float) -> list[bool]:
    """What a new value is compared to; the history stays."""
    return compare_([deepcopy(history)], [new], tolerance=tolerance)[0].tolist()


def test_similar_is_a_small_relative_distance_of_whole_matrices():
    """Of all factors in one call."""
    kept = [[packed(side, seed) for side in SIDES] for seed in (1, 2, 3)]
    before, last, new = kept
    histories = [filled(side, *old) for side, *old in zip(SIDES, before, last, strict=True)]
    for history, x, y in zip(histories, last, before, strict=True):
        assert torch.equal(history.last, x) and torch.equal(history.before, y)
    distances = [
        [
            float((whole(side, x) - whole(side, y)).norm() / whole(side, y).norm())
            for y in (one, other)
        ]
        for side, x, one, other in zip(SIDES, new, last, before, strict=True)
    ]
    for distance in (distance for pair in distances for distance in pair):
        for tolerance in (1.0001 * distance, 0.9999 * distance):
            wanted = [[one < tolerance for one in pair] for pair in distances]
            assert compare_(deepcopy(histories), new, tolerance=tolerance).tolist() == wanted


def test_norms_of_millions_of_elements_keep_their_digits():
    """torch's own is off by 2e-4 at this length."""
    sides = [Side.dense(4096), Side.diagonal(3 * PIECE + 1), Side(63, 20), Side.identity(3)]
    kept = [torch.rand(side.numel, generator=torch.Generator().manual_seed(1)) for side in sides]
    wanted = [
        (2 * x.double().square().sum() - side.diagonal_of(x).double().square().sum()).sqrt()
        for side, x in zip(sides, kept, strict=True)
    ]
    wanted = torch.stack(wanted)
    # pieces keep the length of one sum short
    close(frobenius(kept, sides), wanted, sums=4096, scale=wanted)


def test_nothing_is_similar_to_what_was_not_refreshed_to_zero_or_to_nan():
    side, new = Side.dense(3), packed(Side.dense(3), 1)
    zero, nan, vast = torch.zeros_like(new), new * torch.nan, torch.full_like(new, 1e30)
    for old, value, wanted in (
        ((), new, [False, False]),
        ((new,), new, [True, False]),
        ((new, zero), zero, [False, True]),
        ((nan, new), new, [True, False]),
        ((new, new), nan, [False, False]),
        ((new, vast), new, [False, True]),  # the square of its norm is not finite
    ):
        history = filled(side, *old)
        assert flags(history, value, 10.0) == wanted, old
    identity = Side.identity(3)
    assert flags(filled(identity, torch.zeros(0)), torch.zeros(0), 0.1) == [False, False]
