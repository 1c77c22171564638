"""The op vocabulary against its specification and against float64, on odd sizes."""

import pytest
import torch

from ds_kfac.ops import functional, reference

SIZES = [1, 2, 63, 257, 300]


def symmetric(dim: int) -> torch.Tensor:
    x = torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim))
    return x + x.T


@pytest.mark.parametrize("dim", SIZES)
def test_pack_is_the_row_major_lower_triangle(dim):
    x = symmetric(dim)
    expected = torch.cat([x[row, : row + 1] for row in range(dim)])
    assert torch.equal(functional.symmetric_pack(x), expected)
    assert torch.equal(reference.symmetric_pack(x), expected)


@pytest.mark.parametrize("dim", SIZES)
def test_unpack_inverts_pack(dim, poisoned):
    x = symmetric(dim)
    assert torch.equal(functional.symmetric_unpack(functional.symmetric_pack(x), dim=dim), x)
    assert torch.equal(reference.symmetric_unpack(reference.symmetric_pack(x), dim=dim), x)


@pytest.mark.parametrize("ones_column", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("rows", [1, 65])
def test_syrk_adds_the_packed_second_moment(dim, rows, dtype, ones_column, poisoned):
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows)).to(dtype)
    wide = torch.cat([x.double(), torch.ones(rows, 1, dtype=torch.float64)], 1) if ones_column else x.double()
    start = torch.arange(functional.packed_numel(wide.shape[1])).float()
    expected = start.double() + reference.symmetric_pack(wide.T @ wide)
    for op in (functional.syrk_accumulate_, reference.syrk_accumulate_):
        total = start.clone()
        assert op(total, x, ones_column=ones_column) is total
        torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=1e-4)


def test_syrk_is_in_fp32_under_autocast():
    x = 1 + torch.rand(50, 9, generator=torch.Generator().manual_seed(0)) / 100
    expected = functional.syrk_accumulate_(torch.zeros(45), x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = functional.syrk_accumulate_(torch.zeros(45), x)
    assert torch.equal(actual, expected)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        functional.symmetric_pack(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"expected shape \(6,\) for dim 3, got \(5,\)"):
        functional.symmetric_unpack(torch.zeros(5), dim=3)
    with pytest.raises(ValueError, match=r"fp32 of shape \(10,\) for rows of 3 and a ones column"):
        functional.syrk_accumulate_(torch.zeros(6), torch.zeros(4, 3), ones_column=True)
