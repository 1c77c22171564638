"""Division by damped Kronecker eigenvalues and the inner product with what was divided, in one pass.

Shape suffixes: O, I the sides of a layer's matrix.
"""

# mypy: disable-error-code="arg-type, call-arg, misc"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.triton.base import check_devices, on_device_of, scalar
from ds_kfac.ops.triton.elementwise import WARPS, Layout, blocks_of, oriented, store_dot


@triton.jit(do_not_specialize=["rows"])
def eigen_scale_kernel(
    x_ptr, out_ptr, dot_ptr, row_values_ptr, column_values_ptr, damping, rows, columns, x_stride, out_stride,
    DAMPING_IN_MEMORY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_ROWS, BLOCK_COLUMNS] block a program; unit stride along columns."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row_values = tl.load(row_values_ptr + row, mask=row < rows, other=1.0)
    column_values = tl.load(column_values_ptr + column, mask=column < columns, other=1.0)
    far = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + far * x_stride + column[None, :], mask=inside, other=0.0)
    scaled = x / (row_values[:, None] * column_values[None, :] + scalar(damping, DAMPING_IN_MEMORY))
    tl.store(out_ptr + far * out_stride + column[None, :], scaled, mask=inside)
    store_dot(dot_ptr, tl.where(inside, x * scaled, 0.0))


def eigen_scale_dot(x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Tensor | float) -> tuple[Tensor, Tensor]:
    """x_OI / (values_O values_I^T + damping), and its inner product with x. See ``ops/reference.py``.

    Deterministic: one partial sum a program, added up in order.

    Args:
        x_OI: fp32 [O, I]; either side may be the contiguous one, the result is laid out alike.
        values_O, values_I: [O], [I].
        damping: a number, or a scalar on the device, which is not waited for.

    Returns (fp32 [O, I], fp32 scalar). Cost: 8 O I bytes.
    """
    if values_O.shape != x_OI.shape[:1] or values_I.shape != x_OI.shape[1:]:
        raise ValueError(
            f"eigen_scale_dot: values of {tuple(values_O.shape)} and {tuple(values_I.shape)} do not fit "
            f"{tuple(x_OI.shape)}"
        )
    check_devices("eigen_scale_dot", x_OI, values_O, values_I, damping)
    layout: Layout = oriented(x_OI)
    x, out = layout.x, torch.empty_like(layout.x)
    pair = (values_I, values_O) if layout.transposed else (values_O, values_I)
    row_values, column_values = (values.float().contiguous() for values in pair)
    (block_rows, block_columns), grid = blocks_of(x)
    partial = torch.empty(grid[1] * grid[0], device=x.device)
    with on_device_of(x):
        eigen_scale_kernel[grid](
            x, out, partial, row_values, column_values, damping, *x.shape, x.stride(0), out.stride(0),
            DAMPING_IN_MEMORY=isinstance(damping, Tensor),
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=WARPS,
        )  # fmt: skip
    return out.T if layout.transposed else out, partial.sum()
