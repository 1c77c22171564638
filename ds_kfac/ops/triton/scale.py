"""Division of a layer's matrix by eigenvalues, by corrected ones or by Adam's moments, each in one pass.

At the top what all Triton kernels share. Shape suffixes: O, I the sides of the matrix.
"""

# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc"
import ctypes
import math
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ds_kfac.ops.check import NotMadeFor, check_device, of
from ds_kfac.ops.functional import Scalar

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""Fixed when this module is imported, like the kind of every kernel."""
DEVICE_TYPE = None if INTERPRET else "cuda"
"""Where kernels run; None: anywhere."""
WARPS = 8
MAX_BLOCK_ROWS = 65535
"""Of a launch."""
BLOCKS = {256: (64, 64), 1 << 62: (8, 512)}
"""Columns up to -> rows and columns of a program's block; 16 elements a thread."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, whatever its arguments live on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def scalar(value, IN_MEMORY: tl.constexpr):
    """A number that came as an argument, or as a pointer to it, which needs no host synchronisation."""
    if IN_MEMORY:
        return tl.load(value).to(tl.float32)
    else:
        return value


@triton.jit
def store_dot(dot_ptr, products):
    """This program's partial sum of ``products``."""
    tl.store(dot_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(products))


@triton.jit
def place(rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Of this program's block: rows [BLOCK_ROWS, 1] (int64), columns [1, BLOCK_COLUMNS], what is inside the matrix."""
    row = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    return row.to(tl.int64), column, (row < rows) & (column < columns)


def oriented(x_OI: Tensor) -> tuple[Tensor, bool]:
    """A matrix, or its transpose, with columns of unit stride; and which. A rotation leaves its result transposed:
    taken as it is, without a copy. Raises NotMadeFor: not fp32, or empty."""
    if x_OI.dtype != torch.float32 or x_OI.ndim != 2 or not x_OI.numel():
        raise NotMadeFor(f"expected a fp32 matrix that is not empty, got {x_OI.dtype} {tuple(x_OI.shape)}")
    transposed = x_OI.stride(1) != 1 and x_OI.stride(0) == 1
    return _along(x_OI.T if transposed else x_OI), transposed


def _along(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def blocks_of(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, blocks along columns and along rows; and how large they are. Raises NotMadeFor: too many rows."""
    rows, columns = next(shape for limit, shape in BLOCKS.items() if x.shape[1] <= limit)
    grid = (triton.cdiv(x.shape[1], columns), triton.cdiv(x.shape[0], rows))
    if grid[1] > MAX_BLOCK_ROWS:
        raise NotMadeFor(f"expected at most {MAX_BLOCK_ROWS * rows} rows, got {tuple(x.shape)}")
    return grid, {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "num_warps": WARPS}


@triton.jit(do_not_specialize=["rows"])
def eigen_scale_kernel(
    x_ptr, out_ptr, dot_ptr, row_values_ptr, column_values_ptr, damping, rows, columns, x_stride, out_stride,
    DAMPING_IN_MEMORY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_ROWS, BLOCK_COLUMNS] block a program; unit stride along columns."""
    row, column, inside = place(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    row_values = tl.load(row_values_ptr + row, mask=row < rows, other=1.0)
    column_values = tl.load(column_values_ptr + column, mask=column < columns, other=1.0)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    scaled = x / (row_values * column_values + scalar(damping, DAMPING_IN_MEMORY))
    tl.store(out_ptr + row * out_stride + column, scaled, mask=inside)
    store_dot(dot_ptr, tl.where(inside, x * scaled, 0.0))


def eigen_scale_dot(x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Scalar) -> tuple[Tensor, Tensor]:
    """See ``ops/reference.py``. x_OI is fp32, either side may be the contiguous one; the result is laid out alike.

    Deterministic: one partial sum a program, added up in order. Cost: 8 O I bytes.
    """
    if values_O.shape != x_OI.shape[:1] or values_I.shape != x_OI.shape[1:]:
        raise ValueError(
            f"eigen_scale_dot: values of {tuple(values_O.shape)} and {tuple(values_I.shape)} do not fit "
            f"{tuple(x_OI.shape)}"
        )
    check_device("eigen_scale_dot", (x_OI, values_O, values_I, damping), DEVICE_TYPE)
    x, transposed = oriented(x_OI)
    out, pair = torch.empty_like(x), (values_I, values_O) if transposed else (values_O, values_I)
    row_values, column_values = (values.float().contiguous() for values in pair)
    grid, options = blocks_of(x)
    partial = torch.empty(grid[1] * grid[0], device=x.device)
    with on_device_of(x):
        eigen_scale_kernel[grid](
            x, out, partial, row_values, column_values, damping, *x.shape, x.stride(0), out.stride(0),
            DAMPING_IN_MEMORY=isinstance(damping, Tensor), **options,
        )  # fmt: skip
    return out.T if transposed else out, partial.sum()


@triton.jit(do_not_specialize=["rows"])
def corrected_scale_kernel(
    x_ptr, second_ptr, new_ptr, out_ptr, dot_ptr, keep, terms, damping,
    rows, columns, x_stride, second_stride, out_stride,
    KEEP_IN_MEMORY: tl.constexpr, TERMS_IN_MEMORY: tl.constexpr,
    DAMPING_IN_MEMORY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_ROWS, BLOCK_COLUMNS] block a program; unit stride along columns."""
    row, column, inside = place(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    second = tl.load(second_ptr + row * second_stride + column, mask=inside, other=1.0)
    r = scalar(keep, KEEP_IN_MEMORY)
    averaged = r * second + (1.0 - r) * scalar(terms, TERMS_IN_MEMORY) * x * x
    new = tl.where(r < 1.0, averaged, second)  # 0 * inf would be NaN
    scaled = x / (new + scalar(damping, DAMPING_IN_MEMORY))
    tl.store(new_ptr + row * out_stride + column, new, mask=inside)
    tl.store(out_ptr + row * out_stride + column, scaled, mask=inside)
    store_dot(dot_ptr, tl.where(inside, x * scaled, 0.0))


def corrected_scale_dot(
    x_OI: Tensor, second_OI: Tensor, decay: Scalar, terms: Scalar, damping: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops/reference.py``. All fp32; results are laid out like the moments, of which either side may be the
    contiguous one. x_OI is copied unless it is laid out alike. Cost: 16 O I bytes."""
    if second_OI.shape != x_OI.shape:
        raise ValueError(
            f"corrected_scale_dot: second moments of {tuple(second_OI.shape)} do not fit {tuple(x_OI.shape)}"
        )
    check_device("corrected_scale_dot", (x_OI, second_OI, decay, terms, damping), DEVICE_TYPE)
    second, transposed = oriented(second_OI)
    if second.data_ptr() != second_OI.data_ptr() or x_OI.dtype != torch.float32:
        raise NotMadeFor(f"corrected_scale_dot: expected fp32 with a contiguous side, got {of(x_OI, second_OI)}")
    x = _along(x_OI.T if transposed else x_OI)
    new, out = torch.empty(x.shape, device=x.device), torch.empty(x.shape, device=x.device)
    grid, options = blocks_of(x)
    partial = torch.empty(grid[1] * grid[0], device=x.device)
    with on_device_of(x):
        corrected_scale_kernel[grid](
            x, second, new, out, partial, decay, terms, damping,
            *x.shape, x.stride(0), second.stride(0), out.stride(0),
            KEEP_IN_MEMORY=isinstance(decay, Tensor), TERMS_IN_MEMORY=isinstance(terms, Tensor),
            DAMPING_IN_MEMORY=isinstance(damping, Tensor), **options,
        )  # fmt: skip
    return out.T if transposed else out, new.T if transposed else new, partial.sum()


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
    row, column, inside = place(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    usable = tl.load(usable_ptr) != 0
    steps = tl.maximum(tl.load(updates_ptr) + usable.to(tl.float32), 1.0)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    first = tl.load(first_ptr + row * first_stride + column, mask=inside, other=0.0)
    second = tl.load(second_ptr + row * second_stride + column, mask=inside, other=1.0)
    m = tl.where(usable, lerp(x, first, beta1), first)
    v = tl.where(usable, lerp(x * x, second, beta2), second)
    tl.store(new_first_ptr + row * out_stride + column, m, mask=inside)
    tl.store(new_second_ptr + row * out_stride + column, v, mask=inside)
    ahead = m * (beta1 / correction(steps + 1.0, log_beta1))
    numerator = ahead + x * ((1.0 - beta1) / correction(steps, log_beta1))
    root = tl.sqrt(v * (1.0 / correction(steps, log_beta2)))
    tl.store(direction_ptr + row * out_stride + column, numerator / (root + eps), mask=inside)


def adam_scale(
    x_OI: Tensor, first_OI: Tensor, second_OI: Tensor, updates: Tensor, usable: Tensor, *,
    betas: tuple[float, float], eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``ops/reference.py``. All fp32, but for ``usable``; results are laid out like x, of which either side may be
    the contiguous one. The moments are copied unless they are laid out alike. Cost: 24 O I bytes."""
    if not x_OI.shape == first_OI.shape == second_OI.shape:
        raise ValueError(f"adam_scale: moments do not fit x, got {of(x_OI, first_OI, second_OI)}")
    check_device("adam_scale", (x_OI, first_OI, second_OI, updates, usable), DEVICE_TYPE)
    states = (first_OI.dtype, second_OI.dtype, updates.dtype, usable.dtype)
    if states != (torch.float32, torch.float32, torch.float32, torch.bool):
        raise NotMadeFor(f"adam_scale: expected fp32 and bool, got {of(first_OI, second_OI, updates, usable)}")
    if any(isinstance(number, Tensor) for number in (*betas, eps)):
        raise NotMadeFor("adam_scale: expected betas and eps as numbers, got tensors")
    decays = [ctypes.c_float(beta).value for beta in betas]  # bias corrections must be of what the kernel averages with
    logs = [math.log(decay) if decay > 0 else -math.inf for decay in decays]
    x, transposed = oriented(x_OI)
    first, second = (_along(part.T if transposed else part) for part in (first_OI, second_OI))
    direction, new_first, new_second = (torch.empty(x.shape, device=x.device) for _ in range(3))
    grid, options = blocks_of(x)
    with on_device_of(x):
        adam_scale_kernel[grid](
            x, first, second, direction, new_first, new_second, updates, usable.view(torch.uint8),
            *decays, *logs, eps, *x.shape, x.stride(0), first.stride(0), second.stride(0), direction.stride(0),
            **options,
        )  # fmt: skip
    return (direction.T, new_first.T, new_second.T) if transposed else (direction, new_first, new_second)
