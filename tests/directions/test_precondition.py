"""Preconditioning against the dense Kronecker inverse, and kl-clip."""

import math

import pytest
import torch

from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.directions.kfac_gradient import kl_clip_scale, precondition, precondition_corrected
from ds_kfac.update import rotation as stacking
from ds_kfac.update.rotation import Rotation, norms
from ds_kfac.update.state import CorrectedEigenvalues
from tests.close import close, exact
from tests.curvature.one_factor import refresh
from tests.ops.specification import symmetric_pack


def basis(*matrices: torch.Tensor) -> LayerBasis:
    factors = [
        KroneckerFactor(Side.dense(len(m)), symmetric_pack(m), torch.ones(())) for m in matrices
    ]
    return LayerBasis(*(refresh(factor).basis for factor in factors))


def rotation(*matrices: torch.Tensor) -> Rotation:
    return Rotation.of([basis(*matrices)])


def spd(dim: int) -> torch.Tensor:
    x = torch.randn(3 * dim, dim, generator=torch.Generator().manual_seed(dim))
    return x.T @ x / len(x)


@pytest.mark.parametrize("kind", ["tikhonov", "relative"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (7, 5), (13, 1)])
def test_equals_the_dense_inverse(rows, columns, kind):
    G, A = spd(rows), spd(columns)
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    scale = float(G.trace() / rows * A.trace() / columns) if kind == "relative" else 1.0
    fisher = torch.kron(G.double(), A.double()) + 0.1 * scale * torch.eye(
        rows * columns, dtype=torch.float64
    )
    expected = torch.linalg.solve(fisher, gradient.double().flatten()).view(rows, columns)
    actual, dot = precondition(gradient[None], rotation(G, A), damping=0.1, damping_kind=kind)
    terms = {"sums": 6 * (rows + columns), "condition": torch.linalg.cond(fisher)}
    close(actual[0], expected, **terms)
    close(dot[0], (expected * gradient.double()).sum(), **terms)


def test_is_linear_so_that_a_loss_scale_passes_through():
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    both = rotation(spd(5), spd(7))
    scaled, dot = precondition(1024 * gradient[None], both, damping=0.1)
    plain, plain_dot = precondition(gradient[None], both, damping=0.1)
    exact(scaled, 1024 * plain)
    exact(dot, 1024**2 * plain_dot)


@pytest.mark.parametrize(
    ("quadratic", "expected"),
    [(0.0, 1.0), (0.001, 1.0), (0.004, 0.5), (0.4, 0.05), (float("inf"), 0.0), (float("nan"), 1.0)],
)
def test_kl_clip_bounds_the_step(quadratic, expected):
    actual = kl_clip_scale(torch.tensor(quadratic), kl_clip=0.001)
    close(actual, torch.tensor(expected))


@pytest.mark.parametrize("kind", ["tikhonov", "relative"])
def test_corrected_eigenvalues_take_the_place_of_products(kind):
    """Against float64: the second moment with this gradient in it, its mean known beforehand, the
    inner product."""
    generator = torch.Generator().manual_seed(0)
    gradient, old = torch.randn(5, 7, generator=generator), torch.rand(5, 7, generator=generator)
    both, moments = (
        rotation(spd(5), spd(7)),
        CorrectedEigenvalues(old[None].clone(), torch.tensor([9.0])),
    )
    options = {"damping": 0.1, "damping_kind": kind, "decay": 0.8, "terms_n": torch.tensor([3.0])}
    V, dot, _ = precondition_corrected(
        gradient[None], both, moments, norm_n=gradient.norm()[None], **options
    )
    Q_G, Q_A, g = both.G[0][0].double(), both.A[0][0].double(), gradient.double()
    second = 0.8 * old.double() + 0.2 * 3 * (Q_G.T @ g @ Q_A) ** 2
    damping = 0.1 * second.mean() if kind == "relative" else 0.1
    expected = Q_G @ ((Q_G.T @ g @ Q_A) / (second + damping)) @ Q_A.T
    close(moments.second_OI[0], second, sums=5 + 7)
    close(V[0], expected, sums=2 * (5 + 7))
    close(dot[0], (expected * g).sum(), sums=2 * (5 + 7) + 5 * 7)
    assert moments.updates == 10


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
def test_a_gradient_that_overflows_leaves_corrected_eigenvalues_alone(bad):
    gradient, both = torch.ones(5, 7), rotation(spd(5), spd(7))
    gradient[2, 3] = bad
    moments = CorrectedEigenvalues(torch.rand(1, 5, 7), torch.tensor([3.0]))
    second = moments.second_OI.clone()
    options = {"damping": 0.1, "damping_kind": "relative", "decay": 0.8, "terms_n": 3.0}
    precondition_corrected(gradient[None], both, moments, norm_n=gradient.norm()[None], **options)
    exact(moments.second_OI, second)
    assert moments.updates == 3


@pytest.mark.parametrize("piece", [7, 1 << 22])
def test_norms_are_those_that_fp32_could_not_hold(piece, monkeypatch):
    monkeypatch.setattr(stacking, "PIECE", piece)
    given = [
        torch.full((2, 3), 3e30),
        torch.full((2, 8), 1e-30).T,
        torch.zeros(1, 1),
        torch.full((1, 2), math.nan),
    ]
    found = torch.stack([norms(x.flatten()) for x in given])
    expected = torch.stack([x.double().norm() for x in given])
    close(found, expected, sums=16, scale=expected.nan_to_num())
