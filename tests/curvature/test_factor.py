"""A factor: the sum of a batch, the running average, its history with SP-NGD's rule that this
feeds, and its damped inverse."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.factor import (
    PIECE,
    SETTLED,
    SPIKE,
    History,
    KroneckerFactor,
    Side,
    average_,
    compare_,
    frobenius,
    update_,
    usable,
)
from ds_kfac.curvature.inverse import cholesky_inverse, passes_residual_check, refresh_inverse
from ds_kfac.schedule.timetable import next_interval
from tests.close import close
from tests.curvature.one_factor import SIDES, dense_matrix, fold, random_factor
from tests.ops.specification import symmetric_pack

CPU = torch.device("cpu")


def batch(seed: int, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    return symmetric_pack(x.T @ x), torch.tensor(float(rows))


def test_zero_no_data_and_overflow_are_not_decomposed():
    total, count = batch(0)
    factors, bad = [KroneckerFactor.empty(Side.dense(5)) for _ in range(3)], total.clone()
    fold(factors[0], total, count, decay=0.9)
    fold(factors[2], torch.zeros_like(total), count, decay=0.9)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad[7] = value
        factors.append(KroneckerFactor(Side.dense(5), bad.clone(), torch.ones(())))
    assert usable(factors).tolist() == [True, False, False, False, False, False]
    smallest = replace(factors[0], packed_P=1e-45 * torch.eye(15)[0])
    assert usable([smallest]).all()


def settled(scale: float = 1.0) -> KroneckerFactor:
    """After as many ordinary batches as it takes to know what is ordinary."""
    factor = KroneckerFactor.empty(Side.dense(5))
    for seed in range(SETTLED):
        total, count = batch(seed, rows=40)
        fold(factor, scale * total, count, decay=0.9)
    return factor


def trace(factor: KroneckerFactor) -> float:
    return float(factor.side.diagonal_of(factor.packed_P).sum())


@pytest.mark.parametrize(("usual", "spike"), [(1e-6, 1e35), (1.0, 2e38)])
def test_a_spike_whose_size_or_ratio_leaves_fp32_counts_for_nothing(usual, spike):
    factor, (total, count) = settled(usual), batch(99, rows=40)
    total = total / total.abs().max() * spike
    assert torch.isfinite(total).all()
    after = deepcopy(factor)
    _, flags = update_([after], [total], count[None], decays=[0.9], device=CPU)
    assert flags.tolist() == [[True], [False]], "scaled down, not left out"
    close(after.packed_P, 0.9 * factor.packed_P, sums=1)


def test_what_is_not_a_spike_is_averaged_as_ever():
    total, count = batch(99, rows=40)
    for factor, scale in (
        (settled(), 0.9 * SPIKE),  # ordinary from one batch to the next
        (settled(), 0.0),  # nothing at all
        # too early to know
        (fold(KroneckerFactor.empty(Side.dense(5)), total, count, decay=0.9), 1e4),
        (settled(scale=0.0), 1e4),  # the first gradients below a zero-initialised layer
    ):
        share = float(factor.side.diagonal_of(total).sum() / count) / max(trace(factor), 1e-30)
        scale = scale if trace(factor) == 0 or scale > SPIKE else scale / share
        after = deepcopy(factor)
        excess, _ = average_([after], [scale * total], count[None], [0.9])
        keep = min(1 - 1 / float(after.updates), 0.9)
        close(after.packed_P, keep * factor.packed_P + (1 - keep) * scale * total / count, sums=5)
        assert excess.tolist() == [1.0]


def test_a_batch_without_rows_or_that_is_not_finite_changes_nothing_and_is_counted():
    """Nor does it count as a spike."""
    factor, (total, count) = settled(), batch(99, rows=40)
    before, updates = factor.packed_P.clone(), factor.updates.clone()
    nan, inf, nothing = total.clone(), total.clone(), torch.zeros(())
    nan[3], inf[3] = math.nan, math.inf
    for sum_P, rows, counted in (
        (torch.zeros(15), nothing, [1]),
        (1e6 * torch.ones(15), nothing, [1]),  # of layers that have parted
        (nan, count, [1]),
        (inf, count, [1]),
    ):
        excess, used = average_([factor], [sum_P], rows[None], [0.9])
        assert excess.tolist() == [1.0] and not used.any()
        _, flags = update_([factor], [sum_P.clone()], rows[None], decays=[0.9], device=CPU)
        assert flags[1].tolist() == counted and not flags[0].any()
        assert torch.equal(factor.packed_P, before) and factor.updates == updates
    assert update_([], [], torch.zeros(0), decays=[], device=CPU)[1].sum(dim=1).tolist() == [0, 0]


@pytest.mark.parametrize("side", [*SIDES, Side.dense(5).repeated(3)], ids=str)
def test_a_sum_has_the_blocks_of_the_second_moment_of_the_rows_that_count(side):
    """Whatever the other rows hold."""
    x = torch.randn(33, side.dim, generator=torch.Generator().manual_seed(0))
    kept = torch.arange(33) % 3 > 0
    bias = side.dim > 1 and side.block not in (0, 5)
    if bias:
        x[:, -1] = 1
    rows = x[:, : side.dim - bias].clone()
    rows[~kept] = math.nan
    total = side.accumulate_(torch.zeros(side.numel), rows, kept=kept, bias=bias, scale=0.25)
    blocks = [block for group in side.blocks(total) for block in group]
    index = torch.arange(side.dim) // max(1, side.block)
    moment = 0.25 * x[kept].double().T @ x[kept].double() * (index[:, None] == index)
    assert bool(blocks) == (side.block > 0)
    if blocks:
        close(torch.block_diag(*blocks), moment, sums=33)


COMPARED = [Side.dense(1), Side.dense(63), Side(63, 20), Side.diagonal(9)]


def test_intervals_grow_like_fibonacci_while_a_factor_stays_and_halve_where_it_changes():
    interval, previous, seen = 1, 1, []
    for similar in [(True, True)] * 4 + [(True, False)] * 2 + [(False, False)] * 5:
        interval, previous = next_interval(interval, previous, *similar)
        seen.append(interval)
    assert seen == [2, 3, 5, 8, 8, 8, 4, 2, 1, 1, 1], "where a little changes, it waits"
    assert next_interval(1, 1, False, True)[0] == 1


def whole(side: Side, kept: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*(block for group in side.blocks(kept) for block in group)).double()


def filled(side: Side, *values: torch.Tensor) -> History:
    """After ``values``, in that order."""
    history = History.of(side)
    for value in values:
        compare_([history], [value], tolerance=0.1)
    return history


def test_similar_is_a_small_relative_distance_of_whole_matrices():
    """Of all factors in one call."""
    before, last, new = (
        [random_factor(side, seed).packed_P for side in COMPARED] for seed in (1, 2, 3)
    )
    histories = [filled(side, *old) for side, *old in zip(COMPARED, before, last, strict=True)]
    for history, x, y in zip(histories, last, before, strict=True):
        assert torch.equal(history.last, x) and torch.equal(history.before, y)
    distances = []
    for side, x, *olds in zip(COMPARED, new, last, before, strict=True):
        x, olds = whole(side, x), [whole(side, y) for y in olds]
        distances.append([float((x - y).norm() / y.norm()) for y in olds])
    for distance in (one for pair in distances for one in pair):
        for tolerance in (1.0001 * distance, 0.9999 * distance):
            wanted = [[one < tolerance for one in pair] for pair in distances]
            assert compare_(deepcopy(histories), new, tolerance=tolerance).tolist() == wanted


def test_norms_of_millions_of_elements_keep_their_digits():
    """torch's own is off by 2e-4 at this length."""
    sides = [Side.dense(4096), Side.diagonal(3 * PIECE + 1), Side(63, 20), Side.identity(3)]
    kept = [torch.rand(side.numel, generator=torch.Generator().manual_seed(1)) for side in sides]
    wanted = []
    for side, x in zip(sides, kept, strict=True):
        squares, diagonal = x.double().square(), side.diagonal_of(x).double().square()
        wanted.append((2 * squares.sum() - diagonal.sum()).sqrt())
    wanted = torch.stack(wanted)
    # pieces keep the length of one sum short
    close(frobenius(kept, sides), wanted, sums=4096, scale=wanted)


def test_nothing_is_similar_to_what_was_not_refreshed_to_zero_or_to_nan():
    side, new = Side.dense(3), random_factor(Side.dense(3), 1).packed_P
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
        assert compare_([history], [value], tolerance=10.0)[0].tolist() == wanted, old
    identity = Side.identity(3)
    history = filled(identity, torch.zeros(0))
    assert compare_([history], [torch.zeros(0)], tolerance=0.1).tolist() == [[False, False]]


def test_relative_damping_needs_no_partner_and_16_bits_would_cost_an_inverse_its_definiteness():
    kept, options = random_factor(Side.dense(9)), {"damping": 0.3, "damping_kind": "relative"}
    alone = refresh_inverse(kept, None, **options)
    paired = refresh_inverse(kept, random_factor(Side.dense(4)), **options)
    assert (alone.how, alone.retries) == ("cholesky", 0)
    assert alone.basis.blocks[0].is_contiguous(), "as kernels take them"
    assert torch.equal(alone.basis.blocks[0], paired.basis.blocks[0])
    assert alone.basis.rounded(torch.bfloat16) is alone.basis


def test_damping_that_fp32_rounds_away_is_added_in_float64():
    # 1 + 1e-9 is 1 in fp32
    ones = KroneckerFactor(Side.dense(2), symmetric_pack(torch.ones(2, 2)), torch.ones(()))
    found = refresh_inverse(ones, None, damping=1e-18, damping_kind="relative")
    assert (found.how, found.retries) == ("cholesky", 1)
    expected = torch.linalg.inv(torch.ones(2, 2, dtype=torch.float64) + 1e-9 * torch.eye(2))
    close(found.basis.blocks[0][0], expected)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_what_has_no_inverse_fails_in_every_attempt(bad):
    """A negative value is not met with more damping than was asked for."""
    broken = KroneckerFactor(Side(3, 2), torch.tensor([1.0, 0.0, bad, 1.0]), torch.ones(()))
    found = refresh_inverse(broken, None, damping=1e-3, damping_kind="relative")
    assert found.basis is None and (found.how, found.retries) == ("failed", 2)


def test_a_wrong_inverse_fails_the_residual_check():
    factor = dense_matrix(random_factor(Side.dense(65))).float()
    blocks = torch.stack([factor * (size + 1) for size in range(3)])
    inverse = cholesky_inverse(blocks, added=0.01, scale=0.5)
    assert passes_residual_check(blocks, inverse, added=0.01, scale=0.5).all()
    inverse[1, 7, 7] *= 1.5
    inverse[2] = torch.eye(65)
    right = passes_residual_check(blocks, inverse, added=0.01, scale=0.5)
    assert right.tolist() == [True, False, False]
