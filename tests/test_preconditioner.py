"""Preconditioning against the dense Kronecker inverse, and kl-clip."""

import pytest
import torch

from ds_kfac.eigenbasis import refresh
from ds_kfac.preconditioner import finite_or, kl_clip_scale, precondition


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
    actual = precondition(gradient, refresh(G)[0], refresh(A)[0], damping=0.1, damping_kind=kind)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_is_linear_so_that_a_loss_scale_passes_through():
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    bases = refresh(spd(5))[0], refresh(spd(7))[0]
    scaled = precondition(1024 * gradient, *bases, damping=0.1)
    torch.testing.assert_close(scaled, 1024 * precondition(gradient, *bases, damping=0.1), rtol=1e-6, atol=0)


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
