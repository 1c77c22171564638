"""SP-NGD's rule, and the comparison of factors that feeds it."""

from itertools import pairwise, product

import pytest
import torch

from ds_kfac.adaptive import AdaptiveRule, History
from ds_kfac.capture import BatchSum
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_state import FactorState, folded
from ds_kfac.side import Side

SIDES = [Side.dense(1), Side.dense(63), Side(63, 20), Side.diagonal(9)]


def intervals(rule: AdaptiveRule, flags: list[tuple[bool, bool]]) -> list[int]:
    interval, previous, seen = 1, 1, []
    for similar in flags:
        interval, previous = rule.next_interval(interval, previous, *similar)
        seen.append(interval)
    return seen


def test_a_factor_that_stays_grows_like_fibonacci():
    assert intervals(AdaptiveRule(), [(True, True)] * 6) == [2, 3, 5, 8, 13, 21]


def test_growth_ends_at_the_longest_interval():
    assert intervals(AdaptiveRule(max_interval=6), [(True, True)] * 6) == [2, 3, 5, 6, 6, 6]
    assert intervals(AdaptiveRule(max_interval=1), [(True, True)] * 3) == [1, 1, 1]


@pytest.mark.parametrize("before", [False, True])
def test_a_factor_that_changes_has_the_ordinary_interval(before):
    assert intervals(AdaptiveRule(), [(False, before)] * 5) == [1] * 5


def test_a_change_halves_and_a_small_one_waits():
    flags = [(True, True)] * 4 + [(True, False)] * 2 + [(False, False)] * 5
    assert intervals(AdaptiveRule(), flags) == [2, 3, 5, 8, 8, 8, 4, 2, 1, 1, 1]


def test_an_interval_never_more_than_doubles():
    """Also after halvings, when the interval before the last growth was longer than the present one."""
    for flags in product([(True, True), (False, False), (True, False)], repeat=7):
        seen = [1, *intervals(AdaptiveRule(), list(flags))]
        assert all(after <= 2 * before for before, after in pairwise(seen)), flags


def packed(side: Side, seed: int) -> torch.Tensor:
    x = torch.randn(2 * side.dim + 1, side.dim, generator=torch.Generator().manual_seed(seed))
    return side.accumulate_(torch.zeros(side.numel), x)


def whole(side: Side, kept: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*(block for group in side.blocks(kept) for block in group)).double()


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_similar_is_a_small_relative_distance_of_whole_matrices(side):
    last, before, new = (packed(side, seed) for seed in (1, 2, 3))
    history = History(side).pushed(before).pushed(last)
    assert history.last is last and history.before is before and history.nbytes == 2 * last.nbytes
    for index, old in enumerate((last, before)):
        distance = float((whole(side, new) - whole(side, old)).norm() / whole(side, old).norm())
        for tolerance, similar in ((1.001 * distance, True), (0.999 * distance, False)):
            assert bool(history.compared(new, tolerance=tolerance)[index]) == similar


def test_elements_off_the_diagonal_count_twice():
    """Packed vectors would be 0.1 apart, the matrices are 0.1 sqrt(2)."""
    side = Side.dense(2)
    old, new = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.1, 0.0])
    history = History(side, old)
    assert [bool(history.compared(new, tolerance=t)[0]) for t in (0.11, 0.14, 0.142)] == [False, False, True]


def test_nothing_is_similar_to_what_was_not_refreshed_to_zero_or_to_nan():
    side, new = Side.dense(3), packed(Side.dense(3), 1)
    assert History(side).compared(new, tolerance=10.0).tolist() == [False, False]
    assert History(side).pushed(new).compared(new, tolerance=0.1).tolist() == [True, False]
    zero = torch.zeros_like(new)
    assert History(side, zero, new).compared(zero, tolerance=10.0).tolist() == [False, True]
    assert History(side, new, new * torch.nan).compared(new, tolerance=0.1).tolist() == [True, False]


def test_comparing_does_not_wait_for_the_device():
    side = Side(7, 3)
    meta = torch.zeros(side.numel, device="meta")  # has no values: reading one is an error
    assert History(side, meta, meta).compared(meta, tolerance=0.1).shape == (2,)


def test_a_history_that_shares_the_factor_s_memory_is_counted_once():
    side, cpu = Side.dense(5), torch.device("cpu")
    state = FactorState(KroneckerFactor.empty(side), History(side))
    for seed in range(3):
        batch = BatchSum(packed(side, seed), torch.tensor(11.0))
        ((state, _),) = folded([state], [batch], decays=[0.9], device=cpu, tolerance=0.1)
    assert state.nbytes == 4 * (2 * side.numel + 1), "the factor, its last but one value, and a counter"
