"""Kernel that adds X^T X to a packed fp32 triangle. It computes only tiles of the lower triangle,
and needs neither a [D, D] matrix nor a second pass to pack it.

``CHOSEN`` has the tile sizes for each kind of device and each side length. The sizes for sm_90 were
the fastest in a sweep on an H100. The other sizes were computed, not measured. Tests check that no
configuration spills registers on its devices, with or without tensor descriptors.

Shape suffixes: N rows, D the side of a factor, P = D(D+1)/2 the length of a packed triangle.
Element (r, c) of a packed triangle lies at r(r+1)/2 + c.
"""

# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc"
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ds_kfac.ops.check import DTYPES, NotMadeFor, check_device, describe
from ds_kfac.ops.functional import Scalar, check_syrk, packed_numel
from ds_kfac.ops.triton.scale import DEVICE_TYPE, INTERPRET, on_device_of, scalar

ASSUMED_MULTIPROCESSORS = 132


def architecture() -> int:
    """Return the compute capability of the current device, such as 80, 90 or 100. The interpreter
    works with any value, so 90 is returned there."""
    return 90 if INTERPRET else _architecture(torch.cuda.current_device())


@cache
def _architecture(device: int) -> int:
    return triton.runtime.driver.active.get_current_target().arch


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b, summed in fp32. fp32 operands are not rounded. The interpreter has no
    16-bit products, so it converts operands to fp32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@dataclass(frozen=True)
class SyrkConfig:
    """How a triangle is divided into tiles.

    Attributes:
        block: number of rows of a tile. A square tile has as many columns.
        chunk: number of rows of x that are multiplied at a time.
        warps, stages: Triton's launch options ``num_warps`` and ``num_stages``.
        resident: number of programs that fit into a multiprocessor's registers and shared memory at
            once.
        group: number of tile rows whose tiles are computed column by column, so that concurrent
            programs share columns of x in L2. 1: tiles are computed row by row.
        descriptor: whether x is loaded by tensor descriptors. From sm_90 on these use the tensor
            memory accelerator (TMA).
        columns: number of columns of a tile that is not square, twice or half the number of its
            rows. 0: the tile is square.
    """

    block: int
    chunk: int
    warps: int
    stages: int
    resident: int
    group: int = 1
    descriptor: bool = False
    columns: int = 0

    @property
    def width(self) -> int:
        return self.columns or self.block

    def plain(self) -> "SyrkConfig":
        """Return this configuration without descriptors, for rows that no descriptor can hold."""
        return replace(self, descriptor=False)


@dataclass(frozen=True)
class Chosen:
    """Configurations for one kind of device.

    Attributes:
        source: the machine on which they were measured, or "computed".
        by_side: (largest side, configuration) pairs, sorted by side. The last pair also serves
            larger sides.
    """

    source: str
    by_side: tuple[tuple[int, SyrkConfig], ...]

    def at(self, dim: int) -> SyrkConfig:
        return next((config for side, config in self.by_side if dim <= side), self.by_side[-1][1])


_SMALL = SyrkConfig(64, 64, 4, 4, 3, descriptor=True)
_FLAT = SyrkConfig(64, 128, 4, 3, 2, descriptor=True)
_LARGE = SyrkConfig(128, 64, 8, 3, 2, descriptor=True)
_GROUPED = replace(_LARGE, group=16)
_DEEP = SyrkConfig(128, 128, 8, 3, 1, group=16, descriptor=True)
_WIDE = SyrkConfig(128, 64, 8, 4, 1, group=8, descriptor=True, columns=256)
_OLD_SMALL, _OLD_LARGE = SyrkConfig(64, 64, 4, 4, 3), SyrkConfig(128, 32, 8, 4, 1)
_EXACT = SyrkConfig(64, 16, 4, 3, 4)
INTERPRETED = SyrkConfig(32, 16, 4, 1, 1, group=2, descriptor=True)
LARGEST = 1 << 20
CHOSEN: dict[str, Chosen] = {
    "sm_80": Chosen("computed", ((512, _OLD_SMALL), (LARGEST, _OLD_LARGE))),
    "sm_90": Chosen(
        "NVIDIA H100 80GB HBM3, torch 2.11.0, triton 3.6.0",
        ((512, _FLAT), (1024, _DEEP), (3072, _WIDE), (4096, _DEEP), (LARGEST, _WIDE)),
    ),
    "sm_100": Chosen("computed", ((512, _SMALL), (4096, _LARGE), (LARGEST, _GROUPED))),
    "fp32": Chosen("computed", ((LARGEST, _EXACT),)),
}
"""Configurations for 16-bit rows, by kind of device. The entry "fp32" is for fp32 rows on every
device, because tensor cores do not multiply these rows."""


def family(dtype: torch.dtype, arch: int) -> str:
    """Return a key of the table :data:`CHOSEN`. Consumer Blackwell (sm_120) is treated like sm_80:
    it has the same tensor cores and little shared memory."""
    if dtype == torch.float32:
        return "fp32"
    return {9: "sm_90", 10: "sm_100"}.get(arch // 10, "sm_80")


def describable(x_ND: torch.Tensor) -> bool:
    """Whether a descriptor can hold these rows: each row must start at a multiple of 16 bytes, and
    its columns must be contiguous."""
    aligned = x_ND.data_ptr() % 16 == 0 and x_ND.stride(0) * x_ND.element_size() % 16 == 0
    return (
        aligned
        and x_ND.stride(1) == 1
        and x_ND.stride(0) >= x_ND.shape[1]
        and max(x_ND.shape) < 1 << 31
    )


def config_for(x_ND: torch.Tensor, arch: int) -> SyrkConfig:
    """Return the configuration for the rows x on a device."""
    config = INTERPRETED if INTERPRET else CHOSEN[family(x_ND.dtype, arch)].at(x_ND.shape[1])
    return config if describable(x_ND) else config.plain()


EPILOGUE_CHUNKS = 6
"""Assumed cost of adding a tile to the triangle, as a multiple of the cost of multiplying one chunk
of rows. Computed, not measured."""
MAX_SPLIT = 8


def tile_count(dim: int, block: int, width: int) -> int:
    """Return the number of [block, width] tiles on and below the diagonal."""
    large = max(block, width)
    small = min(block, width)
    side = triton.cdiv(dim, large)
    return side * (side + 1) // 2 * (large // small)


def split_for(tiles: int, chunks: int, places: int) -> int:
    """Return how many programs share a tile. Each of them multiplies a part of the ``chunks`` of
    rows.

    Programs run in waves of ``places`` programs at a time. The returned number minimizes the count
    of waves times the work of one wave. It is 1 under torch's deterministic algorithms, because the
    order of atomic additions varies.
    """
    return (
        1 if torch.are_deterministic_algorithms_enabled() else _fewest_waves(tiles, chunks, places)
    )


@cache
def _fewest_waves(tiles: int, chunks: int, places: int) -> int:
    def cost(split: int) -> int:
        return triton.cdiv(tiles * split, places) * (triton.cdiv(chunks, split) + EPILOGUE_CHUNKS)

    return min(range(1, min(MAX_SPLIT, max(chunks, 1)) + 1), key=cost)


@triton.jit
def tile_at(index):
    """Return (row, column) of tile number ``index`` of a triangle. Tiles are numbered row by
    row."""
    row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)
    # rounding may make the square root too large or too small by one
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def grouped_tile_at(index, side, GROUP: tl.constexpr):
    """Return (row, column) of tile number ``index`` of a triangle that has ``side`` tile rows.

    Tiles are numbered column by column within GROUP tile rows. Programs with neighbouring indices
    then share columns of X, which stay in L2.
    """
    row, column = tile_at(index)
    if GROUP == 1:
        return row, column
    else:
        # before a group's first row, both orders have numbered the same tiles
        first = row // GROUP * GROUP
        height = tl.minimum(GROUP, side - first)
        inside = index - first * (first + 1) // 2
        # the group's own triangle comes last
        end_row, end_column = tile_at(tl.maximum(inside - first * height, 0))
        rectangle = inside < first * height  # whether the tile is left of the group's own triangle
        row = first + tl.where(rectangle, inside % height, end_row)
        return row, tl.where(rectangle, inside // height, first + end_column)


@triton.jit
def place_of(index, dim, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of the [BLOCK, WIDTH] tile number ``index``. Tiles that are
    not square are parts of square ones."""
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
def add_tile(sum_ptr, tile, first_row, first_column, dim, ATOMIC: tl.constexpr):
    """Add the part of the tile that is in the lower triangle, 32 columns at a time. The addresses
    of a whole tile would not fit into registers."""
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1]
    if WIDTH > 32:
        left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))
        add_tile(sum_ptr, left, first_row, first_column, dim, ATOMIC)
        add_tile(sum_ptr, right, first_row, first_column + WIDTH // 2, dim, ATOMIC)
    else:
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, WIDTH)
        far = row.to(tl.int64)
        inside = (row < dim)[:, None] & (column[None, :] <= row[:, None])
        add_to(sum_ptr + (far * (far + 1) // 2)[:, None] + column[None, :], tile, inside, ATOMIC)


@triton.jit
def rows_kept(kept_ptr, row, stop):
    """Return which rows count. A row counts if it is before ``stop`` and is kept. ``kept_ptr``
    points to bool [N]; None: every row is kept."""
    kept = row < stop
    if kept_ptr is not None:
        kept &= tl.load(kept_ptr + row, mask=kept, other=False)
    return kept


@triton.jit
def add_bias_row(
    tail_ptr,
    x_ptr,
    kept_ptr,
    scale,
    first_column,
    start,
    stop,
    dim,
    x_stride,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Add ``scale`` times the column sums of x [N, D] to the bias row.

    Each program sums BLOCK columns, over the rows from start to stop that count. The first program
    also adds the number of these rows.
    """
    row = tl.arange(0, CHUNK)
    column = first_column + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((CHUNK,), tl.float32)
    pointers = x_ptr + (start + row).to(tl.int64)[:, None] * x_stride + column[None, :]
    for begin in range(start, stop, CHUNK):
        kept = rows_kept(kept_ptr, begin + row, stop)
        x = tl.load(pointers, mask=kept[:, None] & (column < dim)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), axis=0)
        count += kept.to(tl.float32)
        pointers += CHUNK * x_stride
    add_to(tail_ptr + column, scale * total, column < dim, ATOMIC)
    add_to(tail_ptr + dim, scale * tl.sum(count), first_column == 0, ATOMIC)


@triton.jit(do_not_specialize=["rows", "tiles"])
def syrk_kernel(
    sum_ptr,
    left_desc,
    right_desc,
    x_ptr,
    kept_ptr,
    scale,
    rows,
    dim,
    tail,
    x_stride,
    tiles,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ATOMIC: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
):
    """Compute one tile, or one block of the bias row, for a part of the rows.

    Axis 0 of the grid has the tiles, followed by the blocks of the bias row. Axis 1 has the parts
    of the rows. ``left_desc`` and ``right_desc`` are descriptors of x, or None. With a descriptor,
    one thread loads a whole [CHUNK, BLOCK] part of x, with zeros outside of x. ``kept_ptr`` points
    to bool [N], whether each row counts. It is None if all rows count, and always None with
    descriptors.
    """
    part = tl.cdiv(tl.cdiv(rows, tl.num_programs(1)), CHUNK) * CHUNK
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, rows)
    row = tl.arange(0, CHUNK)
    if tl.program_id(0) < tiles:
        first_row, first_column = place_of(tl.program_id(0), dim, BLOCK, WIDTH, GROUP)
        tile = tl.zeros((BLOCK, WIDTH), tl.float32)
        if left_desc is not None:
            # a part consists of whole chunks, so no row of the next part is read
            for begin in range(start, stop, CHUNK):
                left = left_desc.load([begin, first_row])
                right = right_desc.load([begin, first_column])
                # the transpose makes no copy, because tensor cores can read shared memory
                # transposed
                tile = dot(tl.trans(left), right, tile)
        else:
            left_column = first_row + tl.arange(0, BLOCK)
            right_column = first_column + tl.arange(0, WIDTH)
            first = (start + row).to(tl.int64) * x_stride
            # these addresses load X^T directly, without a transpose
            left_ptr = x_ptr + left_column[:, None] + first[None, :]
            right_ptr = x_ptr + first[:, None] + right_column[None, :]
            for begin in range(start, stop, CHUNK):
                kept = rows_kept(kept_ptr, begin + row, stop)
                # Both operands need the zeros: a row that does not count may hold NaN, and 0 times
                # NaN is NaN.
                left = tl.load(
                    left_ptr, mask=(left_column < dim)[:, None] & kept[None, :], other=0.0
                )
                right = tl.load(
                    right_ptr, mask=kept[:, None] & (right_column < dim)[None, :], other=0.0
                )
                tile = dot(left, right, tile)
                left_ptr += CHUNK * x_stride
                right_ptr += CHUNK * x_stride
        add_tile(
            sum_ptr, tile * scalar(scale, SCALE_IN_MEMORY), first_row, first_column, dim, ATOMIC
        )
    else:
        add_bias_row(
            sum_ptr + tail,
            x_ptr,
            kept_ptr,
            scalar(scale, SCALE_IN_MEMORY),
            (tl.program_id(0) - tiles) * BLOCK,
            start,
            stop,
            dim,
            x_stride,
            BLOCK,
            CHUNK,
            ATOMIC,
        )


def syrk_accumulate_(
    sum_P: Tensor,
    x_ND: Tensor,
    *,
    kept: Tensor | None = None,
    bias: bool = False,
    scale: Scalar = 1.0,
) -> Tensor:
    """See ``ops/functional.py``.

    bf16 and fp16 rows are multiplied on tensor cores. fp32 rows are multiplied in full fp32. Rows
    are copied if their columns are not contiguous. A row that does not count is not read.

    Cost: N D (D + block) FLOPs, about half of X^T X, and 4 D (D + 1) bytes for the triangle. The
    result is deterministic if torch is set to be deterministic, but a small D then uses fewer
    multiprocessors.
    """
    rows, dim = x_ND.shape
    check_syrk(sum_P, x_ND, kept, bias)
    if x_ND.dtype not in DTYPES or not sum_P.is_contiguous():
        raise NotMadeFor(
            "syrk_accumulate_: expected rows in bf16, fp16 or fp32 and a contiguous sum, got "
            f"{describe(x_ND, sum_P)}"
        )
    check_device("syrk_accumulate_", (sum_P, x_ND, kept, scale), DEVICE_TYPE)
    if not rows or not dim:
        return sum_P
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    kept = None if kept is None else kept.contiguous()
    accumulate(sum_P, x_ND, config_for(x_ND, architecture()), kept=kept, bias=bias, scale=scale)
    return sum_P


def accumulate(
    sum_P: Tensor,
    x_ND: Tensor,
    config: SyrkConfig,
    *,
    kept: Tensor | None = None,
    bias: bool = False,
    scale: Scalar = 1.0,
) -> None:
    """Compute :func:`syrk_accumulate_` in the tiles of ``config``. The caller has checked the
    arguments.

    If ``kept`` is given, rows are loaded without descriptors, because only loads by pointer can be
    masked.
    """
    rows, dim = x_ND.shape
    config = config if kept is None else config.plain()
    tiles = tile_count(dim, config.block, config.width)
    split = split_for(
        tiles, triton.cdiv(rows, config.chunk), config.resident * multiprocessors(x_ND.device)
    )
    programs = tiles + (triton.cdiv(dim, config.block) if bias else 0)
    left = right = None
    if config.descriptor:
        left, right = (
            TensorDescriptor.from_tensor(x_ND, [config.chunk, n])
            for n in (config.block, config.width)
        )
    with on_device_of(x_ND):
        syrk_kernel[(programs, split)](
            sum_P,
            left,
            right,
            x_ND,
            kept,
            scale,
            rows,
            dim,
            packed_numel(dim),
            x_ND.stride(0),
            tiles,
            BLOCK=config.block,
            WIDTH=config.width,
            CHUNK=config.chunk,
            GROUP=config.group,
            ATOMIC=split > 1,
            SCALE_IN_MEMORY=isinstance(scale, Tensor),
            num_warps=config.warps,
            num_stages=config.stages,
        )
