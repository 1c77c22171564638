"""Damped inverses of factors: fallbacks, and what is refused."""

import pytest
import torch

from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.inverse import (
    cholesky_inverse,
    passes_residual_check,
    refresh_inverse,
)
from tests.close import close
from tests.curvature.one_factor import dense_matrix, random_factor
from tests.ops.specification import symmetric_pack


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
