"""Sides: every structure is the same block-diagonal part of a second moment."""

import pytest
import torch

from ds_kfac.curvature.factor import Side
from tests.close import close
from tests.curvature.one_factor import SIDES

ALL = [*SIDES, Side(257, 129)]


def blocks_of(matrix: torch.Tensor, side: Side) -> torch.Tensor:
    index = torch.arange(side.dim) // side.block
    return matrix * (index[:, None] == index[None, :])


@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("side", ALL, ids=str)
def test_accumulates_the_blocks_of_the_second_moment(side, bias, some, poisoned):
    x = torch.randn(33, side.dim, generator=torch.Generator().manual_seed(0))
    if bias:
        x[:, -1] = 1
    kept = torch.arange(33) % 3 > 0 if some else None
    counted = x.double() if kept is None else x[kept].double()
    rows = x[:, : side.dim - bias]
    if kept is not None:
        rows[~kept] = float("nan")
    total = side.accumulate_(torch.zeros(side.numel), rows, kept=kept, bias=bias)
    if side.block == 0:
        assert total.numel() == 0
        return
    expected = blocks_of(counted.T @ counted, side)
    actual = torch.block_diag(*(block for group in side.blocks(total) for block in group))
    close(actual, expected, sums=33)
    close(side.diagonal_of(total).sum(), expected.trace(), sums=33 + side.dim)
    # the scale is of what is added alone
    more = side.accumulate_(torch.ones(side.numel), rows, kept=kept, bias=bias, scale=0.25)
    close(more - 1, 0.25 * total, sums=33, scale=1 + total.abs().max())


def test_each_part_of_a_repeated_side_has_its_bias():
    x = torch.randn(33, 3, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.arange(33) % 3 > 0
    side = Side.dense(5).repeated(3)
    total = side.accumulate_(torch.zeros(side.numel), x.flatten(1), kept=kept, bias=True)
    for part, actual in enumerate(side.blocks(total)[0]):
        rows = torch.cat([x[kept, part], torch.ones(int(kept.sum()), 1)], dim=1).double()
        close(actual, rows.T @ rows, sums=33)


@pytest.mark.parametrize(("dim", "block"), [(8, 8), (9, 5), (17, 6)])
def test_a_long_side_is_cut_evenly(dim, block):
    assert Side.blocks_of(dim, 8) == Side(dim, block)
