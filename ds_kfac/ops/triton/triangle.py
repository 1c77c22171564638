"""Tiles of a packed lower triangle: which there are, how many programs share one, adding one to the triangle.

Element (r, c) of the row-major packed triangle lies at r(r+1)/2 + c.
"""

# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc"
import torch
import triton
import triton.language as tl

EPILOGUE_CHUNKS = 6
"""What adding a tile to the triangle is taken to cost, in chunks of rows multiplied. Computed, not measured."""
MAX_SPLIT = 8


def tile_count(dim: int, block: int, width: int) -> int:
    """Tiles [block, width] on and below the diagonal."""
    large, small = max(block, width), min(block, width)
    side = triton.cdiv(dim, large)
    return side * (side + 1) // 2 * (large // small)


def split_for(tiles: int, chunks: int, places: int) -> int:
    """Programs that share a tile, each with part of the rows: what takes the fewest waves times work per wave.

    1 if torch asks for deterministic algorithms: with more, the order of additions is open.

    Args:
        chunks: of rows, multiplied one after the other.
        places: programs that run at a time.
    """
    if torch.are_deterministic_algorithms_enabled():
        return 1

    def cost(split: int) -> int:
        return triton.cdiv(tiles * split, places) * (triton.cdiv(chunks, split) + EPILOGUE_CHUNKS)

    return min(range(1, min(MAX_SPLIT, max(chunks, 1)) + 1), key=cost)


@triton.jit
def tile_at(index):
    """(row, column) of a tile; tiles are numbered row by row."""
    row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)  # the root may be off by a rounding
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def grouped_tile_at(index, side, GROUP: tl.constexpr):
    """(row, column) of a tile of a triangle of ``side`` tile rows, GROUP rows at a time column by column.

    Programs with neighbouring indices then need about as many tile rows as tile columns of the same X, which stay in
    L2; row by row they would need whole rows of a large triangle.
    """
    row, column = tile_at(index)
    if GROUP == 1:
        return row, column
    else:
        first = row // GROUP * GROUP  # both orders have finished the same tiles before a group
        height = tl.minimum(GROUP, side - first)
        inside = index - first * (first + 1) // 2
        end_row, end_column = tile_at(tl.maximum(inside - first * height, 0))  # the group's own triangle comes last
        left = inside < first * height
        return first + tl.where(left, inside % height, end_row), tl.where(left, inside // height, first + end_column)


@triton.jit
def place_of(index, dim, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile [BLOCK, WIDTH]; those that are not square are parts of square ones."""
    SIDE: tl.constexpr = BLOCK if BLOCK > WIDTH else WIDTH
    DOWN: tl.constexpr = SIDE // BLOCK
    ALONG: tl.constexpr = SIDE // WIDTH
    row, column = grouped_tile_at(index // (DOWN * ALONG), tl.cdiv(dim, SIDE), GROUP)
    return row * SIDE + index % DOWN * BLOCK, column * SIDE + index % ALONG * WIDTH


@triton.jit
def add_to(pointers, values, mask, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(pointers, values, mask=mask, sem="relaxed")
    else:
        tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def _add_slice(sum_ptr, values, first_row, first_column, dim, ATOMIC: tl.constexpr):
    row = first_row + tl.arange(0, values.shape[0])
    column = first_column + tl.arange(0, values.shape[1])
    far = row.to(tl.int64)
    inside = (row < dim)[:, None] & (column[None, :] <= row[:, None])
    add_to(sum_ptr + (far * (far + 1) // 2)[:, None] + column[None, :], values, inside, ATOMIC)


@triton.jit
def _halves(values):
    """Left and right columns."""
    apart = tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2))
    return tl.split(tl.permute(apart, (0, 2, 1)))


@triton.jit
def _add_128(sum_ptr, values, first_row, first_column, dim, ATOMIC: tl.constexpr):
    left, right = _halves(values)
    first, second = _halves(left)
    third, fourth = _halves(right)
    _add_slice(sum_ptr, first, first_row, first_column, dim, ATOMIC)
    _add_slice(sum_ptr, second, first_row, first_column + 32, dim, ATOMIC)
    _add_slice(sum_ptr, third, first_row, first_column + 64, dim, ATOMIC)
    _add_slice(sum_ptr, fourth, first_row, first_column + 96, dim, ATOMIC)


@triton.jit
def add_tile(sum_ptr, tile, first_row, first_column, dim, ATOMIC: tl.constexpr):
    """Add what a tile has of the lower triangle, in slices of 32 columns: addresses of a whole one spill."""
    WIDTH: tl.constexpr = tile.shape[1]
    tl.static_assert(WIDTH == 16 or WIDTH == 32 or WIDTH == 64 or WIDTH == 128 or WIDTH == 256)
    if WIDTH <= 32:
        _add_slice(sum_ptr, tile, first_row, first_column, dim, ATOMIC)
    elif WIDTH == 64:
        left, right = _halves(tile)
        _add_slice(sum_ptr, left, first_row, first_column, dim, ATOMIC)
        _add_slice(sum_ptr, right, first_row, first_column + 32, dim, ATOMIC)
    elif WIDTH == 128:
        _add_128(sum_ptr, tile, first_row, first_column, dim, ATOMIC)
    else:
        left, right = _halves(tile)
        _add_128(sum_ptr, left, first_row, first_column, dim, ATOMIC)
        _add_128(sum_ptr, right, first_row, first_column + 128, dim, ATOMIC)
