"""X^T X added to a packed fp32 triangle, with rows that arrive by tensor descriptors (TMA on sm_90 and later)."""

# mypy: disable-error-code="arg-type, call-arg, misc"
import triton
import triton.language as tl

from ds_kfac.ops.triton.base import dot, scalar
from ds_kfac.ops.triton.bias_row import add_bias_row
from ds_kfac.ops.triton.triangle import add_tile, place_of


@triton.jit(do_not_specialize=["rows", "tiles", "ones_stride"])
def syrk_descriptor_kernel(
    sum_ptr, left_desc, right_desc, x_ptr, ones_ptr, scale, rows, dim, tail, x_stride, ones_stride, tiles,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ATOMIC: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """As ``syrk_kernel``; one thread asks for a [CHUNK, BLOCK] piece of x, what lies outside of x arrives as zeros."""
    part = tl.cdiv(tl.cdiv(rows, tl.num_programs(1)), CHUNK) * CHUNK
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, rows)
    if tl.program_id(0) < tiles:
        first_row, first_column = place_of(tl.program_id(0), dim, BLOCK, WIDTH, GROUP)
        tile = tl.zeros((BLOCK, WIDTH), tl.float32)
        for begin in range(start, stop, CHUNK):  # parts are whole chunks, so none reads rows of the next
            left = left_desc.load([begin, first_row])
            right = right_desc.load([begin, first_column])
            tile = dot(tl.trans(left), right, tile)  # a view of shared memory, which tensor cores read transposed
        tile *= scalar(scale, SCALE_IN_MEMORY)
        add_tile(sum_ptr, tile, first_row, first_column, dim, ATOMIC)
    else:
        first_column = (tl.program_id(0) - tiles) * BLOCK
        add_bias_row(
            sum_ptr + tail, x_ptr, ones_ptr, scalar(scale, SCALE_IN_MEMORY), first_column, start, stop, dim,
            x_stride, ones_stride, BLOCK, CHUNK, ATOMIC,
        )  # fmt: skip
