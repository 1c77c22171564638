"""The bias row of a packed triangle, [column sums, sum of ones]: its contiguous tail, by programs of their own."""

# mypy: disable-error-code="arg-type, call-arg, misc"
import triton
import triton.language as tl

from ds_kfac.ops.triton.triangle import add_to


@triton.jit
def add_bias_row(
    tail_ptr, x_ptr, ones_ptr, scale, first_column, start, stop, dim, x_stride, ones_stride,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """``scale`` times sums of rows start..stop: BLOCK columns of x [N, D]; the first program also the ones [N, 1]."""
    row = tl.arange(0, CHUNK)
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
    add_to(tail_ptr + column, scale * total, column < dim, ATOMIC)
    add_to(tail_ptr + dim, scale * tl.sum(count), first_column == 0, ATOMIC)
