"""Corrected eigenvalues: their running average, the division by them and the inner product, in one pass.

Shape suffixes: O, I the sides of a layer's matrix.
"""

# mypy: disable-error-code="arg-type, call-arg, misc"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.guarded import NotMadeFor, of
from ds_kfac.ops.triton.base import check_devices, on_device_of, scalar
from ds_kfac.ops.triton.elementwise import WARPS, blocks_of, oriented, store_dot


@triton.jit(do_not_specialize=["rows"])
def corrected_scale_kernel(
    x_ptr, second_ptr, new_ptr, out_ptr, dot_ptr, keep, terms, damping,
    rows, columns, x_stride, second_stride, out_stride,
    KEEP_IN_MEMORY: tl.constexpr, TERMS_IN_MEMORY: tl.constexpr,
    DAMPING_IN_MEMORY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_ROWS, BLOCK_COLUMNS] block a program; unit stride along columns."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    far, near = row.to(tl.int64)[:, None], column[None, :]
    x = tl.load(x_ptr + far * x_stride + near, mask=inside, other=0.0)
    second = tl.load(second_ptr + far * second_stride + near, mask=inside, other=1.0)
    r = scalar(keep, KEEP_IN_MEMORY)
    folded = r * second + (1.0 - r) * scalar(terms, TERMS_IN_MEMORY) * x * x
    new = tl.where(r < 1.0, folded, second)  # 0 * inf would be NaN
    scaled = x / (new + scalar(damping, DAMPING_IN_MEMORY))
    tl.store(new_ptr + far * out_stride + near, new, mask=inside)
    tl.store(out_ptr + far * out_stride + near, scaled, mask=inside)
    store_dot(dot_ptr, tl.where(inside, x * scaled, 0.0))


def corrected_scale_dot(
    x_OI: Tensor,
    second_OI: Tensor,
    decay: Tensor | float,
    terms: Tensor | float,
    damping: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold x into the second moments and divide by them. See ``ops/reference.py``.

    The mean of the new moments, for relative damping, is known before: r mean(second) + (1 - r) terms |x|^2 / (O I).

    Args:
        x_OI: fp32 [O, I]; copied unless it is contiguous along the same side as the moments.
        second_OI: fp32 [O, I]; either side may be the contiguous one.
        decay: weight of the past; 1 leaves the moments as they are, also where x is not finite.
        terms: factor that brings x^2 to the units of the Fisher, loss terms over the squared loss scale.

    Returns (scaled fp32 [O, I], new fp32 [O, I], inner product of x and scaled, a fp32 scalar), laid out like the
    moments. Cost: 16 O I bytes.
    """
    if second_OI.shape != x_OI.shape:
        raise ValueError(
            f"corrected_scale_dot: second moments of {tuple(second_OI.shape)} do not fit {tuple(x_OI.shape)}"
        )
    check_devices("corrected_scale_dot", x_OI, second_OI, decay, terms, damping)
    layout = oriented(second_OI)
    second, x = layout.x, x_OI.T if layout.transposed else x_OI
    if second.data_ptr() != second_OI.data_ptr() or x_OI.dtype != torch.float32:
        raise NotMadeFor(f"corrected_scale_dot: expected fp32 with a contiguous side, got {of(x_OI, second_OI)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    new, out = torch.empty(x.shape, device=x.device), torch.empty(x.shape, device=x.device)
    (block_rows, block_columns), grid = blocks_of(x)
    partial = torch.empty(grid[1] * grid[0], device=x.device)
    with on_device_of(x):
        corrected_scale_kernel[grid](
            x, second, new, out, partial, decay, terms, damping,
            *x.shape, x.stride(0), second.stride(0), out.stride(0),
            KEEP_IN_MEMORY=isinstance(decay, Tensor),
            TERMS_IN_MEMORY=isinstance(terms, Tensor), DAMPING_IN_MEMORY=isinstance(damping, Tensor),
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=WARPS,
        )  # fmt: skip
    if layout.transposed:
        new, out = new.T, out.T
    return out, new, partial.sum()
