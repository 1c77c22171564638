"""Moments in the eigenbasis: EKFAC's exact case, Adam, what a refresh does to them."""

import itertools

import pytest
import torch

from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.curvature.factor import SETTLED, SPIKE, KroneckerFactor, Side
from ds_kfac.ops.dispatch import adam_step_
from ds_kfac.update import rotation
from ds_kfac.update.rotation import change_basis_
from ds_kfac.update.state import AdamMoments, CorrectedEigenvalues
from tests.close import close, exact
from tests.curvature.one_factor import refresh

YES = torch.tensor([True])


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


def test_corrected_eigenvalues_are_the_diagonal_of_the_true_fisher_in_the_basis():
    """One gradient at a time: their running mean square, rotated, is diag(Q^T F Q) of F = mean
    vec(dW) vec(dW)^T."""
    torch.manual_seed(1)
    # none so large that it would be limited
    inputs, gradients = torch.rand(40, 5) - 0.3, torch.rand(40, 3) - 0.3
    # a and g depend on each other, so F is no Kronecker product
    gradients = gradients * (0.5 + inputs[:, :1])
    basis = random_basis(3, 5)
    moments = CorrectedEigenvalues.empty((1, 3, 5))
    for a, g in zip(inputs, gradients, strict=True):
        divide_(moments, basis.rotate(torch.outer(g, a)), decay=0.9999)
    vectors = torch.einsum("no,ni->noi", gradients, inputs).flatten(1).double()
    fisher = vectors.T @ vectors / 40
    Q = torch.kron(basis.G.vectors[0][0], basis.A.vectors[0][0]).double()
    expected = (Q.T @ fisher @ Q).diagonal().view(3, 5)
    close(moments.second_OI[0], expected, sums=40 + 2 * (3 + 5))
    kronecker = torch.outer(basis.G.values, basis.A.values)
    assert (kronecker - expected).norm() > 0.1 * expected.norm(), (
        "the Kronecker eigenvalues are another thing"
    )


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


def test_a_spike_that_is_too_large_to_compare_counts_for_nothing():
    moments = CorrectedEigenvalues.empty((1, 2, 3))
    for step in range(SETTLED):
        divide_(moments, 1e-5 * torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
    before = moments.second_OI[0].clone()
    _, _, limited = divide_(moments, 1e17 * torch.ones(2, 3))
    assert limited
    close(moments.second_OI[0], 0.9 * before, sums=1)


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


def folded(moments: AdamMoments, gradient: torch.Tensor, *, betas, eps=1e-8) -> torch.Tensor:
    """Adam's direction, with the gradient in the moments."""
    direction = gradient.clone()[None]
    adam_step_(direction, direction, *vars(moments).values(), YES, betas=betas, eps=eps)
    return direction[0]


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


@pytest.mark.parametrize("b1", [0.0, 0.8])
def test_the_direction_is_adams_with_nesterovs_momentum(b1):
    """Without momentum it is torch's."""
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    adam = torch.optim.AdamW([parameter], lr=1.0, betas=(b1, 0.9), eps=1e-3, weight_decay=0.0)
    moments = AdamMoments.empty((1, 3, 4))
    for step in range(1, 6):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        adam.step()
        actual = folded(moments, gradient, betas=(b1, 0.9), eps=1e-3)
        if not b1:
            close(
                actual,
                before - parameter.detach(),
                sums=10,
                condition=1 / (1 - 0.9),
                scale=before.abs().max() + 1,
            )
        ahead = b1 * moments.first_OI[0] / (1 - b1 ** (step + 1)) + (1 - b1) * gradient / (
            1 - b1**step
        )
        expected = ahead / ((moments.second_OI[0] / (1 - 0.9**step)).sqrt() + 1e-3)
        close(actual, expected, sums=10)


@pytest.mark.parametrize("several", [False, True])
def test_a_refresh_rotates_a_momentum_in_place(several):
    """Of a layer of several its own alone."""
    old, new = random_basis(3, 5, seed=0), random_basis(3, 5, seed=1)
    momenta = torch.randn(2, 3, 5)
    kept = torch.stack([old.rotate(momentum) for momentum in momenta])
    before, turned = kept.clone(), kept[1] if several else kept[1].clone()
    change_basis_(turned, old, new)
    close(new.restore(turned), momenta[1], sums=4 * (3 + 5))
    exact(kept[0], before[0])
    assert torch.equal(kept[1], turned) == several


def quadratic_losses(*, rotate: bool) -> list[float]:
    """Adam in a drifting eigenbasis on f(W) = ½ tr((W - W*) A (W - W*)^T G), refreshed every 10
    steps."""
    torch.manual_seed(0)
    target, W = torch.randn(6, 8), torch.zeros(6, 8)
    x, g = (
        torch.randn(400, 8) * torch.logspace(0, -2, 8),
        torch.randn(400, 6) * torch.logspace(0, -1, 6),
    )
    mix_A, mix_G = torch.linalg.qr(torch.randn(8, 8))[0], torch.linalg.qr(torch.randn(6, 6))[0]
    x, g = x @ mix_A, g @ mix_G
    A, G = x.T @ x / 400, g.T @ g / 400
    moments, basis, losses = AdamMoments.empty((1, 6, 8)), None, []
    for step in range(120):
        losses.append(float(((W - target) @ A * (G @ (W - target))).sum()) / 2)
        if step % 10 == 0:
            part = torch.randint(400, (60,), generator=torch.Generator().manual_seed(step))
            sides = []
            for rows in (g[part], x[part]):
                side = Side.dense(rows.shape[1])
                total = side.accumulate_(torch.zeros(side.numel), rows) / len(rows)
                sides.append(refresh(KroneckerFactor(side, total, torch.ones(()))).basis)
            new = LayerBasis(*sides)
            if rotate:
                change_basis_(moments.first_OI, basis, new)
            basis = new
        gradient = basis.rotate(G @ (W - target) @ A)
        direction = folded(moments, gradient, betas=(0.9, 0.95))
        W = W - 0.02 * basis.restore(direction)
    return losses


def test_the_loss_does_not_jump_at_a_refresh():
    kept = quadratic_losses(rotate=True)
    assert kept[-1] < 0.05 * kept[0], "it converges to the known minimum, 0"
    drops = [(after - before) / kept[0] for before, after in itertools.pairwise(kept)]
    at_refresh = [drops[step] for step in range(20, 119, 10)]
    elsewhere = [drop for step, drop in enumerate(drops) if step >= 20 and step % 10]
    assert max(at_refresh) <= max(*elsewhere, 0.002), "steps right after a refresh lose no ground"
    forgotten = quadratic_losses(rotate=False)
    assert sum(forgotten[20:]) > 1.02 * sum(kept[20:]), (
        "moments left in old coordinates do worse, so the test can tell"
    )
