"""Elementwise kernels for n matrices of one shape: Adam's direction, the moments' update, a direction's final scale.

Helpers of all Triton kernels are at the top. Shape suffixes: n matrices, O and I the sides of each.
"""

# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc"
import math
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ds_kfac.ops.check import DTYPES, NotMadeFor, check_device, describe
from ds_kfac.ops.functional import SMALLEST, Scalar, in_fp32

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""Triton decides it for a kernel when that is defined, so it is read once, at import."""
DEVICE_TYPE = None if INTERPRET else "cuda"
"""Type of the device on which kernels run; None: any."""
WARPS = 8
MAX_MATRICES = 65535
"""Matrices in a launch, at most: CUDA's limit for the second axis of a grid."""
FLAT_BLOCK = 2048
"""Elements that a program takes, 8 per thread."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Makes x's device the current one: Triton launches there, not on the device of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def scalar(value, IN_MEMORY: tl.constexpr):
    """The value of a number, or of a pointer to one; a pointer spares the host the wait for the value."""
    if IN_MEMORY:
        return tl.load(value).to(tl.float32)
    else:
        return value


@triton.jit
def lerp(now, old, decay):
    """decay old + (1 - decay) now, rounded as torch.lerp rounds: from the end that is nearer."""
    return tl.where(decay < 0.5, now + (old - now) * decay, old - (old - now) * (1.0 - decay))


@triton.jit
def correction(steps, log_decay):
    """1 - decay^steps; by a series where the power is close to 1, since the difference would cancel."""
    y = steps * log_decay
    series = 1.0 + y / 8.0
    for i in tl.static_range(6):
        series = 1.0 + y / (7.0 - i) * series
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def flat_place(numel, BLOCK: tl.constexpr):
    """(int64 indices of this program's elements in a matrix, whether each index is inside)."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return element, element < numel


@triton.jit(do_not_specialize=["updates_ptr", "usable_ptr", "numel"])
def adam_scale_kernel(
    direction_ptr, waiting_ptr, x_ptr, first_ptr, second_ptr, updates_ptr, usable_ptr, scale,
    beta1, beta2, log_beta1, log_beta2, eps, numel, SCALE_IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes ``BLOCK`` elements of one matrix; grid: (blocks of a matrix, matrices)."""
    element, inside = flat_place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    at = matrix * numel + element
    usable = tl.load(usable_ptr + matrix) != 0
    steps = tl.load(updates_ptr + matrix) + 1.0
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = tl.where(usable, x * scalar(scale, SCALE_IN_MEMORY), 0.0)
    tl.store(waiting_ptr + at, y.to(waiting_ptr.dtype.element_ty), mask=inside)
    m = lerp(y, tl.load(first_ptr + at, mask=inside, other=0.0), beta1)
    v = lerp(y * y, tl.load(second_ptr + at, mask=inside, other=1.0), beta2)
    ahead = m * (beta1 / correction(steps + 1.0, log_beta1))
    numerator = ahead + y * ((1.0 - beta1) / correction(steps, log_beta1))
    root = tl.sqrt(v * (1.0 / correction(steps, log_beta2)))
    tl.store(direction_ptr + at, tl.where(usable, numerator / (root + eps), 0.0), mask=inside)


def adam_scale_(
    direction_nOI: Tensor, waiting_nOI: Tensor, x_nOI: Tensor, first_nOI: Tensor, second_nOI: Tensor,
    updates_n: Tensor, usable_n: Tensor, scale: Scalar = 1.0, *, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """See ``ops/functional.py``. All tensors contiguous; fp32 but for ``usable_n`` and ``waiting_nOI``. Cost: 16 n O I
    bytes, and those of ``waiting_nOI``."""
    fp32 = direction_nOI, x_nOI, first_nOI, second_nOI
    _check_adam("adam_scale_", fp32, waiting_nOI, updates_n, usable_n, (*betas, eps), scale)
    grid, options = flat_blocks_of(x_nOI)
    with on_device_of(x_nOI):
        adam_scale_kernel[grid](
            direction_nOI, waiting_nOI, x_nOI, first_nOI, second_nOI, updates_n, usable_n.view(torch.uint8), scale,
            *_decays(betas), eps, x_nOI[0].numel(), SCALE_IN_MEMORY=isinstance(scale, Tensor), **options,
        )  # fmt: skip


@triton.jit(do_not_specialize=["updates_ptr", "usable_ptr", "numel"])
def adam_fold_kernel(
    first_ptr, second_ptr, updates_ptr, waiting_ptr, usable_ptr, beta1, beta2, numel, BLOCK: tl.constexpr
):
    """The grid is that of :func:`adam_scale_kernel`. A matrix's first program counts the update."""
    element, inside = flat_place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    at = matrix * numel + element
    usable = tl.load(usable_ptr + matrix) != 0
    x = tl.load(waiting_ptr + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=0.0)
    tl.store(first_ptr + at, tl.where(usable, lerp(x, first, beta1), first), mask=inside)
    tl.store(second_ptr + at, tl.where(usable, lerp(x * x, second, beta2), second), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(updates_ptr + matrix, tl.load(updates_ptr + matrix) + usable.to(tl.float32))


def adam_fold_(
    first_nOI: Tensor, second_nOI: Tensor, updates_n: Tensor, waiting_nOI: Tensor, usable_n: Tensor, *,
    betas: tuple[float, float],
) -> None:  # fmt: skip
    """See ``ops/functional.py`` and :func:`adam_scale_`. Cost: 16 n O I bytes, and those of ``waiting_nOI``."""
    _check_adam("adam_fold_", (first_nOI, second_nOI), waiting_nOI, updates_n, usable_n, betas)
    grid, options = flat_blocks_of(first_nOI)
    with on_device_of(first_nOI):
        adam_fold_kernel[grid](
            first_nOI, second_nOI, updates_n, waiting_nOI, usable_n.view(torch.uint8), *_decays(betas)[:2],
            first_nOI[0].numel(), **options,
        )  # fmt: skip


# vectors are views into vectors of all layers: with specialisation Triton would compile anew for each alignment
@triton.jit(
    do_not_specialize=[
        "norm_ptr", "size_ptr", "target_ptr", "full_ptr", "bound_ptr", "replacement_ptr", "numel", "parts", "apart",
    ]
)  # fmt: skip
def finish_direction_kernel(
    out_ptr, x_ptr, norm_ptr, size_ptr, target_ptr, full_ptr, bound_ptr, replacement_ptr, shift, numel,
    parts, apart, SMALLEST: tl.constexpr, HAS_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The grid is that of :func:`adam_scale_kernel`. Matrices of the result have ``parts`` of x and begin ``apart``
    elements from each other."""
    element, inside = flat_place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    start = matrix // parts * apart + matrix % parts * numel
    norm, scale = tl.load(norm_ptr + matrix), tl.load(target_ptr + matrix)
    if HAS_SIZE:
        part = tl.load(size_ptr + matrix) / tl.load(full_ptr + matrix)
        scale = scale * tl.where(part > 1.0, 1.0, part) / tl.maximum(norm, SMALLEST)  # tl.minimum would drop a NaN
    good = norm < tl.load(bound_ptr + matrix)
    x = tl.load(x_ptr + matrix * numel + element, mask=inside, other=0.0)
    y = tl.where(good, x * scale + shift, tl.load(replacement_ptr + matrix))
    tl.store(out_ptr + start + element, y.to(out_ptr.dtype.element_ty), mask=inside)


def finish_direction_(
    out_nOI: Tensor, x_nOI: Tensor, norm_n: Tensor, size_n: Tensor | None, target_n: Tensor, full_n: Tensor,
    bound_n: Tensor, replacement_n: Tensor, shift: float,
) -> None:  # fmt: skip
    """See ``ops/functional.py``. fp32 and contiguous but for ``out_nOI``, whose matrices are. Cost: 4 n O I bytes, and
    those of ``out_nOI``."""
    vectors = norm_n, norm_n if size_n is None else size_n, target_n, full_n, bound_n, replacement_n
    _check_flat("finish_direction_", (x_nOI,), vectors, (shift,))
    check_device("finish_direction_", (x_nOI, out_nOI), DEVICE_TYPE)
    if len(x_nOI) % len(out_nOI) or out_nOI.numel() != x_nOI.numel() or out_nOI.shape[-1] != x_nOI.shape[-1]:
        raise ValueError(f"finish_direction_: the result does not fit, got {describe(out_nOI, x_nOI)}")
    if out_nOI.dtype not in DTYPES or not out_nOI[0].is_contiguous():
        raise NotMadeFor(f"finish_direction_: expected contiguous matrices, got {describe(out_nOI)}")
    parts, apart = len(x_nOI) // len(out_nOI), out_nOI.stride(0)
    grid, options = flat_blocks_of(x_nOI)
    with on_device_of(x_nOI):
        finish_direction_kernel[grid](
            out_nOI, x_nOI, *vectors, shift, x_nOI[0].numel(), parts, apart, SMALLEST=SMALLEST,
            HAS_SIZE=size_n is not None, **options,
        )  # fmt: skip


def flat_blocks_of(x_nOI: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """(the grid: blocks of a matrix, matrices; launch options)."""
    return (triton.cdiv(x_nOI[0].numel(), FLAT_BLOCK), len(x_nOI)), {"BLOCK": FLAT_BLOCK, "num_warps": WARPS}


def _check_flat(op: str, matrices: tuple[Tensor, ...], vectors: tuple[Tensor, ...], numbers: tuple) -> None:
    """Raise ValueError unless shapes fit; NotMadeFor for tensors that are not fp32 or not contiguous, for no matrix or
    more than a launch can have, and for tensors in place of numbers."""
    shape = matrices[0].shape
    if any(x.shape != shape for x in matrices) or any(x.shape != shape[:1] for x in vectors):
        raise ValueError(f"{op}: moments, vectors and matrices do not fit, got {describe(*matrices, *vectors)}")
    check_device(op, (*matrices, *vectors), DEVICE_TYPE)
    plain = all(x.dtype is torch.float32 and x.is_contiguous() for x in (*matrices, *vectors))
    if not plain or len(shape) != 3 or not shape.numel() or shape[0] > MAX_MATRICES:
        raise NotMadeFor(f"{op}: expected contiguous fp32 [n, O, I] and [n], got {describe(*matrices, *vectors)}")
    if any(isinstance(number, Tensor) for number in numbers):
        raise NotMadeFor(f"{op}: expected betas, eps or shift as numbers, got tensors")


def _check_adam(
    op: str, matrices: tuple[Tensor, ...], waiting: Tensor, updates: Tensor, usable: Tensor, numbers: tuple,
    scale: Scalar = 1.0,
) -> None:  # fmt: skip
    """:func:`_check_flat` for the arguments of Adam's ops."""
    _check_flat(op, matrices, (updates,), numbers)
    check_device(op, (updates, usable, waiting, scale), DEVICE_TYPE)
    if waiting.shape != matrices[0].shape or usable.shape != updates.shape:
        raise ValueError(f"{op}: waiting or usable does not fit, got {describe(waiting, usable, matrices[0])}")
    if not waiting.is_contiguous() or waiting.dtype not in DTYPES or usable.dtype is not torch.bool:
        raise NotMadeFor(f"{op}: expected a contiguous buffer and bool, got {describe(waiting, usable)}")


def _decays(betas: tuple[float, float]) -> list[float]:
    """[beta1, beta2, log beta1, log beta2], with the betas rounded to fp32."""
    decays = in_fp32(betas)
    return [*decays, *(math.log(decay) if decay > 0 else -math.inf for decay in decays)]
