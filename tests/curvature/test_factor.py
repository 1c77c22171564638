"""A factor: the sum of a batch, and the running average."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.factor import (
    SETTLED,
    SPIKE,
    KroneckerFactor,
    Side,
    average_,
    update_,
    usable,
)
from tests.close import close
from tests.curvature.one_factor import SIDES, fold
from tests.ops.specification import symmetric_pack

CPU = torch.device("cpu")


def batch(
    seed: int, rows: int = 7, dim: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return x.T @ x / rows, symmetric_pack(x.T @ x), torch.tensor(float(rows))


def test_zero_no_data_and_overflow_are_not_decomposed():
    _, total, count = batch(0)
    factors, bad = [KroneckerFactor.empty(Side.dense(5)) for _ in range(3)], total.clone()
    fold(factors[0], total, count, decay=0.9)
    fold(factors[2], torch.zeros_like(total), count, decay=0.9)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad[7] = value
        factors.append(KroneckerFactor(Side.dense(5), bad.clone(), torch.ones(())))
    assert usable(factors).tolist() == [True, False, False, False, False, False]
    assert usable([replace(factors[0], packed_P=1e-45 * torch.eye(15)[0])]).all(), (
        "the smallest number"
    )


def settled(scale: float = 1.0) -> KroneckerFactor:
    """After as many ordinary batches as it takes to know what is ordinary."""
    factor = KroneckerFactor.empty(Side.dense(5))
    for seed in range(SETTLED):
        _, total, count = batch(seed, rows=40)
        fold(factor, scale * total, count, decay=0.9)
    return factor


def trace(factor: KroneckerFactor) -> float:
    return float(factor.side.diagonal_of(factor.packed_P).sum())


@pytest.mark.parametrize(("usual", "spike"), [(1e-6, 1e35), (1.0, 2e38)])
def test_a_spike_whose_size_or_ratio_leaves_fp32_counts_for_nothing(usual, spike):
    factor, (_, total, count) = settled(usual), batch(99, rows=40)
    total = total / total.abs().max() * spike
    assert torch.isfinite(total).all()
    after = deepcopy(factor)
    _, flags = update_([after], [total], count[None], decays=[0.9], device=CPU)
    assert flags.tolist() == [[True], [False]], "scaled down, not left out"
    close(after.packed_P, 0.9 * factor.packed_P, sums=1)


def test_what_is_not_a_spike_is_averaged_as_ever():
    _, total, count = batch(99, rows=40)
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
    factor, (_, total, count) = settled(), batch(99, rows=40)
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
