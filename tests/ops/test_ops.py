"""The op vocabulary against its specification and against float64, on odd sizes."""

import pytest
import torch

from ds_kfac.ops import dispatch, functional, reference
from tests.close import close

SIZES = [1, 2, 63, 257, 300]


def symmetric(dim: int) -> torch.Tensor:
    x = torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim))
    return x + x.T


@pytest.mark.parametrize("dim", SIZES)
def test_pack_is_the_row_major_lower_triangle(dim):
    x = symmetric(dim)
    expected = torch.cat([x[row, : row + 1] for row in range(dim)])
    packed = torch.empty_like(expected)
    functional.symmetric_pack_into_(packed, [0], [x])
    assert torch.equal(packed, expected)
    assert torch.equal(reference.symmetric_pack(x), expected)


@pytest.mark.parametrize("dim", SIZES)
def test_unpack_inverts_pack(dim, poisoned):
    x = symmetric(dim)
    packed = reference.symmetric_pack(x)
    assert torch.equal(functional.symmetric_unpack_from(packed, [0], [dim])[0], x)
    assert torch.equal(reference.symmetric_unpack(packed, dim=dim), x)


@pytest.mark.parametrize("ones_column", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("rows", [1, 65])
def test_syrk_adds_the_packed_second_moment(ops, dim, rows, dtype, ones_column, poisoned):
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows)).to(dtype)
    ones = torch.ones(rows, 1) if ones_column else None
    wide = torch.cat([x.double(), torch.ones(rows, 1, dtype=torch.float64)], 1) if ones_column else x.double()
    start = torch.arange(functional.packed_numel(wide.shape[1])).float()
    expected = start.double() + reference.symmetric_pack(wide.T @ wide)
    total = start.clone()
    assert ops.syrk_accumulate_(total, x, ones_column=ones) is total
    close(total, expected, sums=rows)


@pytest.mark.parametrize("scale", [1.0, 0.37, torch.tensor(0.37)], ids=str)
@pytest.mark.parametrize(("dim", "dtype"), [(1, torch.float32), (63, torch.float16), (257, torch.bfloat16)])
def test_the_second_moment_is_scaled_after_the_product(ops, dim, dtype, scale, poisoned):
    x = torch.randn(65, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    ones = torch.ones(65, 1, dtype=dtype)
    ones[::3], x[::3] = 0, 0
    wide = torch.cat([x, ones], 1).double()
    start = torch.arange(functional.packed_numel(dim + 1)).float()
    found = ops.syrk_accumulate_(start.clone(), x, ones_column=ones, scale=scale)
    wanted = start.double() + float(scale) * reference.symmetric_pack(wide.T @ wide)
    close(found, wanted, sums=len(x))


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
    with pytest.raises(ValueError, match=r"fp32 of shape \(10,\) for rows of 3 and a ones column"):
        functional.syrk_accumulate_(torch.zeros(6), torch.zeros(4, 3), ones_column=torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"rows of 5 in blocks of 2"):
        functional.block_syrk_accumulate_(torch.zeros(9), torch.zeros(4, 5), block=2)


@pytest.mark.parametrize("rows", [1, 65])
def test_rows_that_do_not_count_leave_the_ones_column_alone(ops, rows, poisoned):
    x, ones = torch.randn(rows, 7), torch.ones(rows, 1)
    x[::3], ones[::3] = 0, 0
    expected = ops.syrk_accumulate_(torch.zeros(36), x[ones[:, 0] > 0], ones_column=ones[ones[:, 0] > 0])
    close(ops.syrk_accumulate_(torch.zeros(36), x, ones_column=ones), expected, sums=rows)


@pytest.mark.parametrize(("dim", "block"), [(1, 1), (63, 1), (63, 7), (257, 257), (256, 2), (300, 150)])
@pytest.mark.parametrize("rows", [1, 65])
def test_block_syrk_adds_the_packed_diagonal_blocks(dim, block, rows, poisoned):
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows))
    parts = [part.T @ part for part in x.double().split(block, dim=1)]
    expected = torch.cat([reference.symmetric_pack(part) for part in parts]) + 1
    for op in (functional.block_syrk_accumulate_, reference.block_syrk_accumulate_):
        total = torch.ones(expected.numel())
        assert op(total, x, block=block) is total
        close(total, expected, sums=rows)
        for scale in (0.37, torch.tensor(0.37)):
            scaled = op(torch.ones(expected.numel()), x, block=block, scale=scale)
            close(scaled, 1 + float(scale) * (expected - 1), sums=rows)


@pytest.mark.parametrize("dim", [2, 3, 5, 10, 15])
@pytest.mark.parametrize("blocks", [1, 2])
def test_many_rows_leave_little_of_a_null_direction(dim, blocks):
    """Those of a softmax's gradients, which sum to zero; far below what counts as rounding (update/rotation.py)."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(200_000, blocks, dim, generator=generator).softmax(-1)
    x[:, :, 0] -= 1
    numel = functional.packed_numel(dim)
    if blocks == 1:
        total = functional.syrk_accumulate_(torch.zeros(numel), x[:, 0])
    else:
        total = functional.block_syrk_accumulate_(torch.zeros(blocks * numel), x.flatten(1), block=dim)
    for part in total.split(numel):
        values = torch.linalg.eigvalsh(reference.symmetric_unpack(part, dim=dim).double())
        assert abs(values[0]) < 4 * torch.finfo(torch.float32).eps * values[-1]
