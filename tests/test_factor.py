"""The running average of a factor."""

import torch

from ds_kfac.factor import KroneckerFactor
from ds_kfac.ops.functional import symmetric_pack
from ds_kfac.side import Side


def dense(factor: KroneckerFactor) -> torch.Tensor:
    (blocks,) = factor.side.blocks(factor.packed_P)
    return blocks[0]


def batch(seed: int, rows: int = 7, dim: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return x.T @ x / rows, symmetric_pack(x.T @ x), torch.tensor(float(rows))


def test_early_averages_are_plain_means_then_decay():
    factor, decay, expected = KroneckerFactor.empty(Side.dense(5)), 0.75, torch.zeros(5, 5)
    for k in range(1, 9):
        mean, total, count = batch(k, rows=k + 2)
        r = min(1 - 1 / k, decay)
        expected = r * expected + (1 - r) * mean
        factor = factor.averaged(total, count, decay=decay)
        torch.testing.assert_close(dense(factor), expected)
    assert factor.updates == 8


def test_there_is_no_identity_start():
    mean, total, count = batch(0)
    torch.testing.assert_close(dense(KroneckerFactor.empty(Side.dense(5)).averaged(total, count, decay=0.95)), mean)


def test_a_batch_without_rows_changes_nothing():
    _, total, count = batch(0)
    factor = KroneckerFactor.empty(Side.dense(5)).averaged(total, count, decay=0.9)
    after = factor.averaged(torch.zeros_like(total), torch.zeros(()), decay=0.9)
    assert torch.equal(after.packed_P, factor.packed_P) and after.updates == 1


def test_a_batch_that_is_not_finite_changes_nothing():
    _, total, count = batch(0)
    factor = KroneckerFactor.empty(Side.dense(5)).averaged(total, count, decay=0.9)
    for value in (float("nan"), float("inf")):
        bad = total.clone()
        bad[3] = value
        after = factor.averaged(bad, count, decay=0.9)
        assert torch.equal(after.packed_P, factor.packed_P) and after.updates == 1


def test_averaging_leaves_the_old_factor_alone():
    _, total, count = batch(0)
    factor = KroneckerFactor.empty(Side.dense(5)).averaged(total, count, decay=0.9)
    before = factor.packed_P.clone()
    factor.averaged(*batch(1)[1:], decay=0.9)
    assert torch.equal(factor.packed_P, before)


def test_zero_no_data_and_overflow_are_not_decomposed():
    _, total, count = batch(0)
    empty = KroneckerFactor.empty(Side.dense(5))
    assert empty.averaged(total, count, decay=0.9).usable()
    assert not empty.usable()
    assert not empty.averaged(torch.zeros_like(total), count, decay=0.9).usable(), "all gradients were zero"
    for value in (float("nan"), float("inf")):
        assert not KroneckerFactor(Side.dense(5), torch.full_like(total, value), torch.ones(())).usable()
    assert KroneckerFactor.empty(Side.identity(5)).usable()
