"""Adam's step of a layer's matrix: both moments and the direction in one pass.

Shape suffixes: O, I the sides of a layer's matrix.
"""

# mypy: disable-error-code="arg-type, call-arg, misc"
import ctypes
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.guarded import NotMadeFor, of
from ds_kfac.ops.triton.base import check_devices, on_device_of
from ds_kfac.ops.triton.elementwise import WARPS, blocks_of, oriented


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
    NESTEROV: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
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
    if NESTEROV:
        ahead = m * (beta1 / correction(steps + 1.0, log_beta1))
        numerator = ahead + x * ((1.0 - beta1) / correction(steps, log_beta1))
    else:
        numerator = m * (1.0 / correction(steps, log_beta1))
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
    nesterov: bool = False,
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
            NESTEROV=nesterov, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=WARPS,
        )  # fmt: skip
    if layout.transposed:
        return direction.T, new_first.T, new_second.T
    return direction, new_first, new_second


def _along(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _log(decay: float) -> float:
    return math.log(decay) if decay > 0 else -math.inf
