"""What the elementwise kernels over a layer's matrix share: orientation, block shape, partial inner products."""

# mypy: disable-error-code="arg-type, call-arg, misc"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
BLOCKS = {256: (64, 64), 1 << 62: (8, 512)}
"""Columns up to -> rows and columns of a program's block; 16 elements a thread."""


@triton.jit
def add_dots(dots_ptr, products, row, column, split, SPLIT_ROWS: tl.constexpr):
    """This program's two partial sums of ``products``: below and from ``split`` on, along one side."""
    if SPLIT_ROWS:
        first = tl.where(row[:, None] < split, products, 0.0)
    else:
        first = tl.where(column[None, :] < split, products, 0.0)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(dots_ptr + 2 * program, tl.sum(first))
    tl.store(dots_ptr + 2 * program + 1, tl.sum(products - first))


@dataclass(frozen=True)
class Layout:
    """A matrix, seen so that its columns have unit stride.

    Attributes:
        x: the matrix or its transpose.
        transposed: which of them.
    """

    x: Tensor
    transposed: bool


def oriented(x_OI: Tensor) -> Layout:
    """A rotation leaves its result transposed: taken as it is, without a copy. Raises unless fp32 and not empty."""
    if x_OI.dtype != torch.float32 or x_OI.ndim != 2 or not x_OI.numel():
        raise ValueError(f"expected a fp32 matrix that is not empty, got {x_OI.dtype} {tuple(x_OI.shape)}")
    if x_OI.stride(1) == 1:
        return Layout(x_OI, False)
    if x_OI.stride(0) == 1:
        return Layout(x_OI.T, True)
    return Layout(x_OI.contiguous(), False)


def block_shape(columns: int) -> tuple[int, int]:
    return next(shape for limit, shape in BLOCKS.items() if columns <= limit)
