"""X^T X added to a packed fp32 triangle: lower tiles only, no [D, D] matrix, no pass to pack it.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle.
"""

# mypy: disable-error-code="arg-type, call-arg, misc"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.guarded import NotMadeFor, of
from ds_kfac.ops.reference import packed_numel
from ds_kfac.ops.triton.base import DTYPES, INTERPRET, architecture, check_devices, dot, multiprocessors, on_device_of
from ds_kfac.ops.triton.triangle import add_tile, add_to, split_for, tile_at, tile_count


@dataclass(frozen=True)
class SyrkConfig:
    """How a product is cut up.

    Attributes:
        block: side of a tile.
        chunk: rows multiplied at once.
        resident: programs that a multiprocessor has registers and shared memory for.
    """

    block: int
    chunk: int
    warps: int
    stages: int
    resident: int


SMALL_DIM = 512
"""Up to here tiles of 64: tiles of 128 would be too few, and mostly above the diagonal or outside."""


def config_for(dtype: torch.dtype, dim: int, arch: int) -> SyrkConfig:
    """The shipped configurations; none spills registers on sm_80, sm_90 or sm_100, see the tests."""
    if INTERPRET:
        return SyrkConfig(32, 16, 4, 1, 1)
    if dtype == torch.float32:  # fp32 units, as no tensor core multiplies in fp32
        return SyrkConfig(64, 16, 4, 3, 4)
    if dim <= SMALL_DIM:
        return SyrkConfig(64, 64, 4, 4, 3)
    return SyrkConfig(128, 32, 8, 4, 1) if arch < 90 else SyrkConfig(128, 64, 8, 3, 2)


@triton.jit(do_not_specialize=["rows", "tiles", "ones_stride"])
def syrk_kernel(
    sum_ptr, x_ptr, ones_ptr, rows, dim, tail, x_stride, ones_stride, tiles,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """One tile a program along axis 0, one part of the rows along axis 1; then one column sum per tile column."""
    part = tl.cdiv(tl.cdiv(rows, tl.num_programs(1)), CHUNK) * CHUNK
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, rows)
    row = tl.arange(0, CHUNK)
    if tl.program_id(0) < tiles:
        tile_row, tile_column = tile_at(tl.program_id(0))
        left_column = tile_row * BLOCK + tl.arange(0, BLOCK)
        right_column = tile_column * BLOCK + tl.arange(0, BLOCK)
        first = (start + row).to(tl.int64) * x_stride
        left_ptr = x_ptr + left_column[:, None] + first[None, :]  # X^T as it lies: no transpose
        right_ptr = x_ptr + first[:, None] + right_column[None, :]
        tile = tl.zeros((BLOCK, BLOCK), tl.float32)
        for begin in range(start, stop, CHUNK):
            inside = begin + row < stop
            left = tl.load(left_ptr, mask=(left_column < dim)[:, None] & inside[None, :], other=0.0)
            right = tl.load(right_ptr, mask=inside[:, None] & (right_column < dim)[None, :], other=0.0)
            tile = dot(left, right, tile)
            left_ptr += CHUNK * x_stride
            right_ptr += CHUNK * x_stride
        add_tile(sum_ptr, tile, tile_row * BLOCK, tile_column * BLOCK, dim, ATOMIC)
    else:
        first_column = (tl.program_id(0) - tiles) * BLOCK
        column = first_column + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        count = tl.zeros((CHUNK,), tl.float32)
        pointers = x_ptr + (start + row).to(tl.int64)[:, None] * x_stride + column[None, :]
        for begin in range(start, stop, CHUNK):
            inside = begin + row < stop
            x = tl.load(pointers, mask=inside[:, None] & (column < dim)[None, :], other=0.0)
            total += tl.sum(x.to(tl.float32), axis=0)
            ones = ones_ptr + (begin + row).to(tl.int64) * ones_stride
            count += tl.load(ones, mask=inside, other=0.0).to(tl.float32)
            pointers += CHUNK * x_stride
        add_to(sum_ptr + tail + column, total, column < dim, ATOMIC)
        add_to(sum_ptr + tail + dim, tl.sum(count), first_column == 0, ATOMIC)


def syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None) -> Tensor:
    """sum_P += pack(X^T X), X = [x_ND, ones_column]. See ``ops/reference.py``.

    Args:
        sum_P: fp32 [P] of side D, or D + 1 with ``ones_column``; contiguous, added to in place.
        x_ND: [N, D] in bf16 or fp16, multiplied on tensor cores, or fp32, which is not rounded and multiplied on
            fp32 units. Sums are in fp32. Copied if its columns are not contiguous.
        ones_column: [N, 1] in a floating dtype: the bias row of the triangle is [column sums of x, sum of ones].

    Cost: N D (D + block) FLOPs, about half of X^T X; 4 D (D + 1) bytes for the triangle. Deterministic if torch is
    told to be, then small D uses fewer multiprocessors.
    """
    (rows, dim), ones = x_ND.shape, ones_column is not None
    if sum_P.dtype != torch.float32 or sum_P.shape != (packed_numel(dim + ones),):
        raise ValueError(
            f"syrk_accumulate_: sum_P must be fp32 of shape ({packed_numel(dim + ones)},) for rows of "
            f"{dim}{' and a ones column' if ones else ''}, got {sum_P.dtype} {tuple(sum_P.shape)}"
        )
    if x_ND.dtype not in DTYPES or not sum_P.is_contiguous():
        raise NotMadeFor(
            f"syrk_accumulate_: expected rows in bf16, fp16 or fp32 and a contiguous sum, got {of(x_ND, sum_P)}"
        )
    check_devices("syrk_accumulate_", sum_P, x_ND, ones_column)
    if not rows or not dim:
        return sum_P
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    config = config_for(x_ND.dtype, dim, architecture())
    tiles = tile_count(dim, config.block)
    split = split_for(tiles, triton.cdiv(rows, config.chunk), config.resident * multiprocessors(x_ND.device))
    programs = tiles + (triton.cdiv(dim, config.block) if ones else 0)
    with on_device_of(x_ND):
        syrk_kernel[(programs, split)](
            sum_P, x_ND, x_ND if ones_column is None else ones_column, rows, dim, packed_numel(dim), x_ND.stride(0),
            0 if ones_column is None else ones_column.stride(0), tiles,
            BLOCK=config.block, CHUNK=config.chunk, ATOMIC=split > 1,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return sum_P
