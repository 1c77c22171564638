"""Moments in the eigenbasis: EKFAC's exact case, Adam, what a refresh does to them."""

import pytest
import torch

from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.curvature.factor import SETTLED, SPIKE, KroneckerFactor, Side
from ds_kfac.update import rotation
from ds_kfac.update.state import CorrectedEigenvalues
from tests.close import close, exact
from tests.curvature.one_factor import refresh


def random_basis(rows: int, columns: int, seed: int = 0) -> LayerBasis:
    generator = torch.Generator().manual_seed(seed)

    def side(dim: int):
        x = torch.randn(3 * dim, dim, generator=generator)
        total = Side.dense(dim).accumulate_(torch.zeros(dim * (dim + 1) // 2), x)
        return refresh(KroneckerFactor(Side.dense(dim), total / len(x), torch.ones(()))).basis

    return LayerBasis(side(rows), side(columns))


def divide_(
    moments: CorrectedEigenvalues, rotated: torch.Tensor, **options
) -> tuple[torch.Tensor, ...]:
    options = {
        "norm_n": rotated.norm()[None],
        "terms_n": 1.0,
        "decay": 0.9,
        "damping": 0.1,
        **options,
    }
    return moments.divide_(rotated[None], **options)


@pytest.mark.parametrize("settled", [True, False])
def test_a_spike_counts_for_ten_times_the_average_once_that_is_settled(settled):
    moments = CorrectedEigenvalues.empty((1, 2, 3))
    for step in range(SETTLED - (not settled)):
        divide_(moments, torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
    before, updates, spike = (
        moments.second_OI[0].clone(),
        float(moments.updates),
        1e3 * torch.randn(2, 3),
    )
    quotient, dot, limited = divide_(moments, spike, terms_n=2.0, layer_mean=lambda mean_n: mean_n)
    share = SPIKE * float(before.sum()) / float(spike.square().sum()) if settled else 2.0
    assert bool(limited) is settled and moments.updates == updates + 1
    keep = min(0.9, 1 - 1 / (updates + 1))
    expected = keep * before + (1 - keep) * share * spike.square()
    close(moments.second_OI[0], expected, sums=2 * 3)
    close(quotient[0], spike / (expected + 0.1 * expected.mean()), sums=2 * 3)
    close(dot[0], (quotient[0] * spike).sum(), sums=2 * 3)


def test_a_large_matrix_meets_its_eigenvalues_some_rows_at_a_time(monkeypatch):
    whole, by_rows = (CorrectedEigenvalues.empty((1, 7, 5)) for _ in range(2))
    for step in range(2):
        x_OI = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
        expected = divide_(whole, x_OI)
        with monkeypatch.context() as patch:
            patch.setattr(rotation, "AT_ONCE", 2 * 5)
            given = x_OI.clone()
            found = divide_(by_rows, given)
        assert found[0].data_ptr() == given.data_ptr(), "in place"
        close(found[:2], expected[:2], sums=7 * 5)
        exact(list(vars(by_rows).values()), list(vars(whole).values()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_whose_size_is_not_finite_changes_no_eigenvalues(bad):
    moments = CorrectedEigenvalues.empty((2, 2, 3))
    moments.divide_(
        torch.ones(2, 2, 3), norm_n=torch.full((2,), 6**0.5), terms_n=1.0, decay=0.9, damping=0.1
    )
    exact([moments.second_OI, moments.updates], [torch.ones(2, 2, 3), torch.ones(2)])
    x_nOI = torch.stack([torch.full((2, 3), bad), torch.full((2, 3), 3.0)])
    norm_n = x_nOI.flatten(1).norm(dim=1)
    moments.divide_(x_nOI, norm_n=norm_n, terms_n=1.0, decay=0.9, damping=0.1)
    exact(moments.updates, torch.tensor([1.0, 2.0]))
    exact(moments.second_OI, torch.tensor([1.0, 5.0])[:, None, None].expand(2, 2, 3))
