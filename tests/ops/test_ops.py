"""The op vocabulary against its specification and against float64, on odd sizes."""

import pytest
import torch

from ds_kfac.ops import dispatch, functional
from tests.ops import specification

SIZES = [1, 2, 63, 257, 300]


def symmetric(dim: int) -> torch.Tensor:
    x = torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim))
    return x + x.T


@pytest.mark.parametrize("dim", SIZES)
def test_unpack_inverts_pack(dim, poisoned):
    x = symmetric(dim)
    packed = specification.symmetric_pack(x)
    assert torch.equal(functional.symmetric_unpack_from(packed, [0], [dim])[0], x)
    assert torch.equal(specification.symmetric_unpack(packed, dim=dim), x)


@pytest.mark.parametrize("op", [functional.syrk_accumulate_, dispatch.syrk_accumulate_])
def test_syrk_is_in_fp32_under_autocast(op):
    x = 1 + torch.rand(50, 9, generator=torch.Generator().manual_seed(0)) / 100
    expected = op(torch.zeros(45), x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = op(torch.zeros(45), x)
    assert torch.equal(actual, expected)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        functional.symmetric_pack_into_(torch.zeros(3), [0], [torch.zeros(2, 3)])
    with pytest.raises(IndexError):
        functional.symmetric_unpack_from(torch.zeros(5), [0], [3])
    with pytest.raises(ValueError, match=r"fp32 of shape \(10,\) for rows of 3 and a bias"):
        functional.syrk_accumulate_(torch.zeros(6), torch.zeros(4, 3), bias=True)
    with pytest.raises(
        ValueError,
        match=r"kept must be bool of shape \(4,\), one for each row, got torch.float32 \(4,\)",
    ):
        functional.syrk_accumulate_(torch.zeros(6), torch.zeros(4, 3), kept=torch.ones(4))
    with pytest.raises(
        ValueError, match=r"block_syrk_accumulate_: kept must be bool of shape \(4,\)"
    ):
        kept = torch.ones(4, 1, dtype=torch.bool)
        functional.block_syrk_accumulate_(torch.zeros(6), torch.zeros(4, 4), block=2, kept=kept)
    with pytest.raises(ValueError, match=r"rows of 5 in blocks of 2"):
        functional.block_syrk_accumulate_(torch.zeros(9), torch.zeros(4, 5), block=2)


@pytest.mark.parametrize("dim", [2, 3, 5, 10, 15])
@pytest.mark.parametrize("blocks", [1, 2])
def test_many_rows_leave_little_of_a_null_direction(dim, blocks):
    """Those of a softmax's gradients, which sum to zero; far below what counts as rounding
    (update/rotation.py)."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(200_000, blocks, dim, generator=generator).softmax(-1)
    x[:, :, 0] -= 1
    numel = functional.packed_numel(dim)
    if blocks == 1:
        total = functional.syrk_accumulate_(torch.zeros(numel), x[:, 0])
    else:
        total = functional.block_syrk_accumulate_(
            torch.zeros(blocks * numel), x.flatten(1), block=dim
        )
    for part in total.split(numel):
        values = torch.linalg.eigvalsh(specification.symmetric_unpack(part, dim=dim).double())
        assert abs(values[0]) < 4 * torch.finfo(torch.float32).eps * values[-1]
