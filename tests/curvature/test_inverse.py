"""Damped inverses of factors: pi-damping, every kind of side, fallbacks, and how they travel."""

import pytest
import torch

from benchmarks.held import bytes_in
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.inverse import (
    FACTORED_DAMPING,
    DampedInverse,
    LayerInverse,
    cholesky_inverse,
    from_packed,
    packed,
    passes_residual_check,
    refresh_inverse,
)
from ds_kfac.curvature.methods import METHODS
from tests.close import close
from tests.curvature.test_eigenbasis import SIDES, factor, matrix
from tests.ops.specification import symmetric_pack

KEPT = [side for side in SIDES if side.block]
LAMBDA = 0.3


def mean(kept: KroneckerFactor) -> float:
    return float(matrix(kept).double().trace()) / kept.side.dim


def expected_inverse(kept: KroneckerFactor, partner: KroneckerFactor, kind: str) -> torch.Tensor:
    """In float64, by the textbook: sqrt(lambda) shared out by pi."""
    lambda_ = LAMBDA * (mean(kept) * mean(partner) if kind == "relative" else 1)
    pi = (mean(kept) / mean(partner)) ** 0.5
    return torch.linalg.inv(
        matrix(kept).double() + pi * lambda_**0.5 * torch.eye(kept.side.dim, dtype=torch.float64)
    )


def inverted(kept: KroneckerFactor, partner: KroneckerFactor | None, kind: str) -> DampedInverse:
    found = refresh_inverse(kept, partner, damping=LAMBDA, damping_kind=kind)
    assert (found.how, found.retries) == ("cholesky" if kept.side.block > 1 else "diagonal", 0)
    return found.basis


@pytest.mark.parametrize("kind", FACTORED_DAMPING)
@pytest.mark.parametrize("side", KEPT, ids=str)
def test_equals_the_inverse_in_float64_and_is_symmetric_to_the_bit(side, kind):
    kept, partner = factor(side), factor(Side.dense(5))
    got = LayerInverse(inverted(kept, partner, kind), DampedInverse()).apply(torch.eye(side.dim))
    expected = expected_inverse(kept, partner, kind)
    close(got, expected, sums=side.dim, condition=torch.linalg.cond(expected))
    assert torch.equal(got, got.T)


@pytest.mark.parametrize("kind", FACTORED_DAMPING)
@pytest.mark.parametrize(
    ("side_G", "side_A"), [(Side.dense(7), Side.dense(63)), (Side(9, 4), Side.diagonal(2))]
)
def test_preconditions_by_both_inverses(side_G, side_A, kind):
    G, A = factor(side_G), factor(side_A)
    gradient = torch.randn(side_G.dim, side_A.dim, generator=torch.Generator().manual_seed(0))
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


def test_both_dampings_multiply_to_lambda_and_relative_needs_no_partner():
    for kind, damp in FACTORED_DAMPING.items():
        total = damp(LAMBDA, 3.0, 0.2) * damp(LAMBDA, 0.2, 3.0)
        close(total, LAMBDA * (0.6 if kind == "relative" else 1))
    assert FACTORED_DAMPING["relative"](LAMBDA, 3.0, 0.2) == FACTORED_DAMPING["relative"](
        LAMBDA, 3.0, 1.0
    )
    kept = factor(Side.dense(9))
    alone, paired = (
        inverted(kept, None, "relative"),
        inverted(kept, factor(Side.dense(4)), "relative"),
    )
    assert torch.equal(alone.blocks[0], paired.blocks[0])


@pytest.mark.parametrize("kind", FACTORED_DAMPING)
def test_the_damping_of_an_identity_is_in_its_partner(kind):
    A, identity = factor(Side.dense(6)), KroneckerFactor.empty(Side.identity(3))
    gradient = torch.randn(3, 6)
    inverse = expected_inverse(A, identity, kind)
    expected = expected_inverse(identity, A, kind) @ gradient.double() @ inverse
    got = LayerInverse(DampedInverse(), inverted(A, identity, kind)).precondition(
        gradient, damping=LAMBDA
    )[0]
    close(got, expected, sums=2 * (3 + 6), condition=torch.linalg.cond(inverse))
    both = LayerInverse(DampedInverse(), DampedInverse()).precondition(gradient, damping=LAMBDA)[0]
    close(both, gradient / (1 + LAMBDA**0.5) ** 2)


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


@pytest.mark.parametrize("side", KEPT, ids=str)
def test_packed_and_back_is_the_same_to_the_bit_and_a_copy(side):
    inverse = inverted(factor(side), None, "relative")
    flat = packed(inverse)
    assert len(flat) == side.numel and bytes_in(inverse) == 4 * METHODS["inverse"].numel(side)
    back, x = from_packed(side, flat), torch.rand(side.dim, 3)
    expected = LayerInverse(inverse, DampedInverse()).apply(x)
    flat.fill_(float("nan"))
    assert torch.equal(LayerInverse(back, DampedInverse()).apply(x), expected) and bytes_in(
        back
    ) == bytes_in(inverse)
    assert inverse.rounded(torch.bfloat16) is inverse, (
        "16 bits would cost an inverse its definiteness"
    )


def test_a_wrong_inverse_fails_the_residual_check():
    blocks = torch.stack([matrix(factor(Side.dense(65))) * (size + 1) for size in range(3)])
    inverse = cholesky_inverse(blocks, added=0.01, scale=0.5)
    assert passes_residual_check(blocks, inverse, added=0.01, scale=0.5).all()
    inverse[1, 7, 9] *= 1.5
    inverse[2] = torch.eye(65)
    assert passes_residual_check(blocks, inverse, added=0.01, scale=0.5).tolist() == [
        True,
        False,
        False,
    ]


def test_inverses_are_in_rows_as_kernels_take_them():
    assert all(
        block.is_contiguous() for block in inverted(factor(Side(9, 4)), None, "relative").blocks
    )


def test_what_is_kept_holds_no_other_memory():
    kept = from_packed(Side(9, 4), torch.arange(21.0))
    assert [block.untyped_storage().nbytes() for block in kept.blocks] == [
        block.nbytes for block in kept.blocks
    ]
