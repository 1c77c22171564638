"""What the elementwise kernels over a layer's matrix share: orientation, block shape, partial inner products."""

# mypy: disable-error-code="arg-type, call-arg, misc"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.guarded import NotMadeFor

WARPS = 8
MAX_BLOCK_ROWS = 65535
"""Of a launch."""
BLOCKS = {256: (64, 64), 1 << 62: (8, 512)}
"""Columns up to -> rows and columns of a program's block; 16 elements a thread."""


@triton.jit
def store_dot(dot_ptr, products):
    """This program's partial sum of ``products``."""
    tl.store(dot_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(products))


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
    """A rotation leaves its result transposed: taken as it is, without a copy.

    Raises:
        NotMadeFor: not fp32, or empty.
    """
    if x_OI.dtype != torch.float32 or x_OI.ndim != 2 or not x_OI.numel():
        raise NotMadeFor(f"expected a fp32 matrix that is not empty, got {x_OI.dtype} {tuple(x_OI.shape)}")
    if x_OI.stride(1) == 1:
        return Layout(x_OI, False)
    if x_OI.stride(0) == 1:
        return Layout(x_OI.T, True)
    return Layout(x_OI.contiguous(), False)


def blocks_of(x: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a block; and the grid: blocks along columns, along rows.

    Raises:
        NotMadeFor: more rows than a launch has blocks for.
    """
    rows, columns = next(shape for limit, shape in BLOCKS.items() if x.shape[1] <= limit)
    grid = (triton.cdiv(x.shape[1], columns), triton.cdiv(x.shape[0], rows))
    if grid[1] > MAX_BLOCK_ROWS:
        raise NotMadeFor(f"expected at most {MAX_BLOCK_ROWS * rows} rows, got {tuple(x.shape)}")
    return (rows, columns), grid
