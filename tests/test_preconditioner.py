"""Preconditioning against the dense Kronecker inverse, and kl-clip."""

import pytest
import torch

from ds_kfac.eigenbasis import LayerBasis, refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.ops.functional import symmetric_pack
from ds_kfac.preconditioner import finite_or, grafted, kl_clip_scale, precondition
from ds_kfac.side import Side


def basis(*matrices: torch.Tensor) -> LayerBasis:
    factors = [KroneckerFactor(Side.dense(len(m)), symmetric_pack(m), torch.ones(())) for m in matrices]
    return LayerBasis(*(refresh(factor).basis for factor in factors))


def spd(dim: int) -> torch.Tensor:
    x = torch.randn(3 * dim, dim, generator=torch.Generator().manual_seed(dim))
    return x.T @ x / len(x)


@pytest.mark.parametrize("kind", ["tikhonov", "relative"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (7, 5), (13, 1)])
def test_equals_the_dense_inverse(rows, columns, kind):
    G, A = spd(rows), spd(columns)
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    scale = float(G.trace() / rows * A.trace() / columns) if kind == "relative" else 1.0
    fisher = torch.kron(G.double(), A.double()) + 0.1 * scale * torch.eye(rows * columns, dtype=torch.float64)
    expected = torch.linalg.solve(fisher, gradient.double().flatten()).view(rows, columns)
    actual = precondition(gradient, basis(G, A), damping=0.1, damping_kind=kind)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_is_linear_so_that_a_loss_scale_passes_through():
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    both = basis(spd(5), spd(7))
    scaled = precondition(1024 * gradient, both, damping=0.1)
    torch.testing.assert_close(scaled, 1024 * precondition(gradient, both, damping=0.1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_replaced(bad):
    gradient, result = torch.ones(2, 3), torch.ones(2, 3)
    result[1, 2] = bad
    chosen, finite = finite_or(result, gradient)
    assert torch.equal(chosen, gradient) and not finite
    chosen, finite = finite_or(2 * gradient, gradient)
    assert torch.equal(chosen, 2 * gradient) and finite


@pytest.mark.parametrize(
    ("quadratic", "expected"),
    [(0.0, 1.0), (0.001, 1.0), (0.004, 0.5), (0.4, 0.05), (float("inf"), 1.0), (float("nan"), 1.0)],
)
def test_kl_clip_bounds_the_step(quadratic, expected):
    actual = kl_clip_scale(torch.tensor(quadratic), kl_clip=0.001)
    torch.testing.assert_close(actual, torch.tensor(expected))


def test_an_exponent_of_one_half_is_the_inverse_square_root():
    gradient, both = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), basis(spd(5), spd(7))
    half = precondition(gradient, both, damping=0.1, exponent=0.5)
    torch.testing.assert_close(
        precondition(half, both, damping=0.1, exponent=0.5), precondition(gradient, both, damping=0.1)
    )


def test_corrected_eigenvalues_take_the_place_of_products():
    gradient, both = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), basis(spd(5), spd(7))
    same = torch.outer(both.G.values, both.A.values)
    expected = precondition(gradient, both, damping=0.1, damping_kind="relative")
    actual = precondition(gradient, both, damping=0.1, damping_kind="relative", eigenvalues_OI=same)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(precondition(gradient, both, damping=1.0, eigenvalues_OI=torch.ones(5, 7)), gradient / 2)


def test_grafting_keeps_the_direction_and_takes_the_norm():
    V, gradient = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(grafted(V, gradient), V * gradient.norm() / V.norm())
    assert torch.equal(grafted(torch.zeros(3, 4), gradient), torch.zeros(3, 4))
