"""Sides: every structure is the same block-diagonal part of a second moment."""

import pytest
import torch

from ds_kfac.curvature.factor import Side
from tests.close import close

SIDES = [Side.dense(1), Side.dense(63), Side(63, 20), Side(64, 2), Side.diagonal(9), Side.identity(9), Side(257, 129)]


def blocks_of(matrix: torch.Tensor, side: Side) -> torch.Tensor:
    index = torch.arange(side.dim) // side.block
    return matrix * (index[:, None] == index[None, :])


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("side", SIDES, ids=str)
def test_accumulates_the_blocks_of_the_second_moment(side, ones, poisoned):
    x = torch.randn(33, side.dim, generator=torch.Generator().manual_seed(0))
    if ones:
        x[:, -1] = 1
    total = torch.zeros(side.numel)
    side.accumulate_(total, x[:, : side.dim - ones], ones_column=torch.ones(33, 1) if ones else None)
    if side.block == 0:
        assert total.numel() == 0
        return
    expected = blocks_of(x.double().T @ x.double(), side)
    actual = torch.block_diag(*(block for group in side.blocks(total) for block in group))
    close(actual, expected, sums=33)
    close(side.diagonal_of(total).sum(), expected.trace(), sums=33 + side.dim)


@pytest.mark.parametrize("side", [side for side in SIDES if side.block], ids=str)
def test_the_scale_is_of_what_is_added_alone(side):
    x = torch.randn(33, side.dim, generator=torch.Generator().manual_seed(0))
    plain, scaled = (side.accumulate_(torch.ones(side.numel), x, scale=scale) for scale in (1.0, 0.25))
    close(scaled - 1, 0.25 * (plain - 1), sums=33)


@pytest.mark.parametrize(("dim", "block"), [(8, 8), (9, 5), (17, 6)])
def test_a_long_side_is_cut_evenly(dim, block):
    assert Side.blocks_of(dim, 8) == Side(dim, block)


def test_kinds_are_said_in_words():
    kinds = [side.kind for side in (Side.dense(4), Side(4, 2), Side.diagonal(4), Side.identity(4), Side.dense(1))]
    assert kinds == ["dense", "blocks of 2", "diagonal", "identity", "dense"]
