"""Damped inverses of factors: pi-damping, every kind of side, fallbacks."""

import pytest
import torch

from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.inverse import (
    FACTORED_DAMPING,
    DampedInverse,
    LayerInverse,
    cholesky_inverse,
    passes_residual_check,
    refresh_inverse,
)
from tests.close import close
from tests.curvature.one_factor import SIDES, dense_matrix, random_factor
from tests.ops.specification import symmetric_pack

LAMBDA = 0.3


def mean(kept: KroneckerFactor) -> float:
    return float(dense_matrix(kept).trace()) / kept.side.dim


def expected_inverse(kept: KroneckerFactor, partner: KroneckerFactor, kind: str) -> torch.Tensor:
    """In float64, by the textbook: sqrt(lambda) shared out by pi."""
    lambda_ = LAMBDA * (mean(kept) * mean(partner) if kind == "relative" else 1)
    added = (mean(kept) / mean(partner) * lambda_) ** 0.5
    return torch.linalg.inv(dense_matrix(kept) + added * torch.eye(kept.side.dim))


def inverted(kept: KroneckerFactor, partner: KroneckerFactor, kind: str) -> DampedInverse:
    if kept.side.block == 0:
        return DampedInverse()
    found = refresh_inverse(kept, partner, damping=LAMBDA, damping_kind=kind)
    assert (found.how, found.retries) == ("cholesky" if kept.side.block > 1 else "diagonal", 0)
    assert all(block.is_contiguous() for block in found.basis.blocks), "as kernels take them"
    return found.basis


@pytest.mark.parametrize("kind", FACTORED_DAMPING)
@pytest.mark.parametrize("side_A", SIDES, ids=str)
@pytest.mark.parametrize("side_G", [Side.dense(7), Side(9, 4), Side.identity(3)], ids=str)
def test_preconditions_by_both_inverses(side_G, side_A, kind):
    """The damping of an identity is in its partner."""
    G, A = random_factor(side_G), random_factor(side_A, 1)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(side_G.dim, side_A.dim, generator=generator)
    inverses = expected_inverse(G, A, kind), expected_inverse(A, G, kind)
    expected = inverses[0] @ gradient.double() @ inverses[1]
    layer = LayerInverse(inverted(G, A, kind), inverted(A, G, kind))
    got, dot = layer.precondition(gradient, damping=LAMBDA)
    terms = {
        "sums": 2 * (side_G.dim + side_A.dim),
        "condition": sum(map(torch.linalg.cond, inverses)),
    }
    close(got, expected, **terms)
    close(dot, (expected * gradient).sum(), **terms, scale=(expected * gradient).abs().sum())
    scaled, _ = layer.precondition(1024 * gradient, damping=LAMBDA)
    assert torch.equal(scaled, 1024 * got), "linear: a loss scale passes through"
    one = LayerInverse(DampedInverse(), layer.A).apply(torch.eye(side_A.dim))
    assert torch.equal(one, one.T), "symmetric to the bit"


def test_relative_damping_needs_no_partner_and_16_bits_would_cost_an_inverse_its_definiteness():
    kept = random_factor(Side.dense(9))
    alone = inverted(kept, None, "relative")
    paired = inverted(kept, random_factor(Side.dense(4)), "relative")
    assert torch.equal(alone.blocks[0], paired.blocks[0])
    assert alone.rounded(torch.bfloat16) is alone


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
