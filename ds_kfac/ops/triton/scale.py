"""Division of a layer's matrix by eigenvalues, by corrected ones or by Adam's moments, each in one pass.

Shape suffixes: O, I the sides of the matrix.
"""

# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc"
import ctypes
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.check import NotMadeFor, of
from ds_kfac.ops.triton.base import check_devices, on_device_of, scalar

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


@triton.jit
def lerp(now, old, decay):
    """As torch.lerp: from the end that is nearer to ``decay``."""
    return tl.where(decay < 0.5, now + (old - now) * decay, old - (old - now) * (1.0 - decay))


@triton.jit
def correction(steps, log_decay):
    """1 - decay^steps: by its series where the power is close to 1, of which little would be left."""
    y = steps * log_decay
    series = 1.0 + y / 8.0
    for i in tl.static_range(6):
        series = 1.0 + y / (7.0 - i) * series
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit(do_not_specialize=["rows"])
def adam_scale_kernel(
    x_ptr, first_ptr, second_ptr, direction_ptr, new_first_ptr, new_second_ptr, updates_ptr, usable_ptr,
    beta1, beta2, log_beta1, log_beta2, eps, rows, columns, x_stride, first_stride, second_stride, out_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_ROWS, BLOCK_COLUMNS] block a program; unit stride along columns."""
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    far, near = row.to(tl.int64)[:, None], column[None, :]
    usable = tl.load(usable_ptr) != 0
    steps = tl.maximum(tl.load(updates_ptr) + usable.to(tl.float32), 1.0)
    x = tl.load(x_ptr + far * x_stride + near, mask=inside, other=0.0)
    first = tl.load(first_ptr + far * first_stride + near, mask=inside, other=0.0)
    second = tl.load(second_ptr + far * second_stride + near, mask=inside, other=1.0)
    m = tl.where(usable, lerp(x, first, beta1), first)
    v = tl.where(usable, lerp(x * x, second, beta2), second)
    tl.store(new_first_ptr + far * out_stride + near, m, mask=inside)
    tl.store(new_second_ptr + far * out_stride + near, v, mask=inside)
    ahead = m * (beta1 / correction(steps + 1.0, log_beta1))
    numerator = ahead + x * ((1.0 - beta1) / correction(steps, log_beta1))
    root = tl.sqrt(v * (1.0 / correction(steps, log_beta2)))
    tl.store(direction_ptr + far * out_stride + near, numerator / (root + eps), mask=inside)


def adam_scale(
    x_OI: Tensor,
    first_OI: Tensor,
    second_OI: Tensor,
    updates: Tensor,
    usable: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold x into both moments and divide. See ``ops/reference.py``.

    Args:
        x_OI: fp32 [O, I]; either side may be the contiguous one.
        first_OI, second_OI: fp32 [O, I]; copied unless they are contiguous along the same side as x.
        updates: fp32 scalar on the device.
        usable: bool scalar on the device.

    Returns (direction, new first, new second), fp32 [O, I], laid out like x. Cost: 24 O I bytes.
    """
    if not x_OI.shape == first_OI.shape == second_OI.shape:
        raise ValueError(f"adam_scale: moments do not fit x, got {of(x_OI, first_OI, second_OI)}")
    check_devices("adam_scale", x_OI, first_OI, second_OI, updates, usable)
    states = (first_OI.dtype, second_OI.dtype, updates.dtype, usable.dtype)
    if states != (torch.float32, torch.float32, torch.float32, torch.bool):
        raise NotMadeFor(f"adam_scale: expected fp32 and bool, got {of(first_OI, second_OI, updates, usable)}")
    if any(isinstance(number, Tensor) for number in (*betas, eps)):
        raise NotMadeFor("adam_scale: expected betas and eps as numbers, got tensors")
    decays = [ctypes.c_float(beta).value for beta in betas]  # bias corrections must be of what the kernel folds with
    layout = oriented(x_OI)
    x = layout.x
    first, second = (_along(part.T if layout.transposed else part) for part in (first_OI, second_OI))
    direction, new_first, new_second = (torch.empty(x.shape, device=x.device) for _ in range(3))
    (block_rows, block_columns), grid = blocks_of(x)
    with on_device_of(x):
        adam_scale_kernel[grid](
            x, first, second, direction, new_first, new_second, updates, usable.view(torch.uint8),
            *decays, *map(_log, decays), eps,
            *x.shape, x.stride(0), first.stride(0), second.stride(0), direction.stride(0),
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=WARPS,
        )  # fmt: skip
    if layout.transposed:
        return direction.T, new_first.T, new_second.T
    return direction, new_first, new_second


def _along(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _log(decay: float) -> float:
    return math.log(decay) if decay > 0 else -math.inf
