"""Elementwise kernels for n matrices of the same shape: a step of Adam, and the final scaling of
directions.

The helpers at the top serve all Triton kernels. Shape suffixes: n matrices, O and I the sides of
each.
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
from ds_kfac.ops.functional import SMALLEST, in_fp32

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter. Triton decides this for a kernel when the kernel is
defined, so the setting is read once, at import."""
DEVICE_TYPE = None if INTERPRET else "cuda"
"""Type of the device on which kernels run; None: any type."""
WARPS = 8
MAX_MATRICES = 65535
"""Largest number of matrices in a launch, which is CUDA's limit for the second axis of a grid."""
FLAT_BLOCK = 2048
"""Number of elements that a program processes, 8 per thread."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Return a context in which the device of x is the current one. Triton launches on the current
    device, not on the device of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def scalar(value, IN_MEMORY: tl.constexpr):
    """Return a scalar that was passed as a number or by a device pointer. With a pointer, the host
    need not wait for the value."""
    if IN_MEMORY:
        return tl.load(value).to(tl.float32)
    else:
        return value


@triton.jit
def lerp(now, old, decay):
    """Return decay * old + (1 - decay) * now. Like torch.lerp, this function adds to the operand
    with the larger weight, so that both functions round alike."""
    return tl.where(decay < 0.5, now + (old - now) * decay, old - (old - now) * (1.0 - decay))


@triton.jit
def correction(steps, log_decay):
    """Return 1 - decay^steps. If the power is close to 1, the result is computed by a series,
    because the difference would suffer from cancellation."""
    y = steps * log_decay
    series = 1.0 + y / 8.0
    for i in tl.static_range(6):
        series = 1.0 + y / (7.0 - i) * series
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def flat_place(numel, BLOCK: tl.constexpr):
    """Return (int64 indices of the elements that this program processes, whether each index is
    inside the matrix)."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return element, element < numel


@triton.jit(do_not_specialize=["updates_ptr", "usable_ptr", "numel"])
def adam_step_kernel(
    direction_ptr,
    x_ptr,
    first_ptr,
    second_ptr,
    updates_ptr,
    usable_ptr,
    beta1,
    beta2,
    log_beta1,
    log_beta2,
    eps,
    numel,
    BLOCK: tl.constexpr,
):
    """Compute ``BLOCK`` elements of one matrix. Grid: (blocks of a matrix, matrices)."""
    element, inside = flat_place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    at = matrix * numel + element
    usable = tl.load(usable_ptr + matrix) != 0
    k = tl.load(updates_ptr + matrix) + 1.0
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=1.0)
    m = lerp(x, first, beta1)
    v = lerp(x * x, second, beta2)
    tl.store(first_ptr + at, tl.where(usable, m, first), mask=inside)
    tl.store(second_ptr + at, tl.where(usable, v, second), mask=inside)
    ahead = m * (beta1 / correction(k + 1.0, log_beta1))
    numerator = ahead + x * ((1.0 - beta1) / correction(k, log_beta1))
    root = tl.sqrt(v * (1.0 / correction(k, log_beta2)))
    tl.store(direction_ptr + at, tl.where(usable, numerator / (root + eps), 0.0), mask=inside)


def adam_step_(
    direction_nOI: Tensor,
    x_nOI: Tensor,
    first_nOI: Tensor,
    second_nOI: Tensor,
    updates_n: Tensor,
    usable_n: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """See ``ops/functional.py``. All tensors must be contiguous, and all but ``usable_n`` must be
    fp32. Memory traffic: 24 n O I bytes."""
    _check_flat("adam_step_", (direction_nOI, x_nOI, first_nOI, second_nOI), (updates_n,), usable_n)
    if any(isinstance(number, Tensor) for number in (*betas, eps)):
        raise NotMadeFor("adam_step_: expected betas and eps as numbers, got tensors")
    beta1, beta2 = in_fp32(betas)
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
    grid, options = flat_blocks_of(x_nOI)
    with on_device_of(x_nOI):
        adam_step_kernel[grid](
            direction_nOI,
            x_nOI,
            first_nOI,
            second_nOI,
            updates_n,
            usable_n.view(torch.uint8),
            beta1,
            beta2,
            *logs,
            eps,
            x_nOI[0].numel(),
            **options,
        )
    updates_n.add_(usable_n)  # after the launch, because all programs of a matrix read k


# The vectors are views into vectors of all layers. If Triton specialised on their addresses, it
# would compile again for each alignment.
@triton.jit(
    do_not_specialize=[
        "norm_ptr",
        "size_ptr",
        "target_ptr",
        "full_ptr",
        "used_ptr",
        "numel",
        "parts",
        "apart",
    ]
)
def finish_direction_kernel(
    out_ptr,
    x_ptr,
    norm_ptr,
    size_ptr,
    target_ptr,
    full_ptr,
    used_ptr,
    numel,
    parts,
    apart,
    SMALLEST: tl.constexpr,
    HAS_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale and store directions, on the grid of :func:`adam_step_kernel`. Each matrix of the
    result consists of ``parts`` matrices of x, one below the other. ``apart`` is the number of
    elements from the start of one matrix of the result to the start of the next."""
    element, inside = flat_place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    start = matrix // parts * apart + matrix % parts * numel
    norm = tl.load(norm_ptr + matrix)
    scale = tl.load(target_ptr + matrix)
    if HAS_SIZE:
        part = tl.load(size_ptr + matrix) / tl.load(full_ptr + matrix)
        # tl.minimum would drop a NaN
        scale = scale * tl.where(part > 1.0, 1.0, part) / tl.maximum(norm, SMALLEST)
    used = (tl.load(used_ptr + matrix) != 0) & (norm < float("inf"))
    x = tl.load(x_ptr + matrix * numel + element, mask=inside, other=0.0)
    y = tl.where(used, x * scale, 0.0)
    tl.store(out_ptr + start + element, y.to(out_ptr.dtype.element_ty), mask=inside)


def finish_direction_(
    out_nOI: Tensor,
    x_nOI: Tensor,
    norm_n: Tensor,
    size_n: Tensor | None,
    target_n: Tensor,
    full_n: Tensor,
    used_n: Tensor,
) -> None:
    """See ``ops/functional.py``. All tensors but ``used_n`` and ``out_nOI`` must be fp32 and
    contiguous. Each matrix of ``out_nOI`` must be contiguous. Memory traffic: 4 n O I bytes, and
    the bytes of ``out_nOI``."""
    vectors = norm_n, norm_n if size_n is None else size_n, target_n, full_n
    _check_flat("finish_direction_", (x_nOI,), vectors, used_n)
    check_device("finish_direction_", (x_nOI, out_nOI), DEVICE_TYPE)
    if (
        len(x_nOI) % len(out_nOI)
        or out_nOI.numel() != x_nOI.numel()
        or out_nOI.shape[-1] != x_nOI.shape[-1]
    ):
        raise ValueError(
            "finish_direction_: the shape of out_nOI does not fit that of x_nOI, got "
            f"{describe(out_nOI, x_nOI)}"
        )
    if out_nOI.dtype not in DTYPES or not out_nOI[0].is_contiguous():
        raise NotMadeFor(
            f"finish_direction_: expected contiguous matrices, got {describe(out_nOI)}"
        )
    parts = len(x_nOI) // len(out_nOI)
    apart = out_nOI.stride(0)
    grid, options = flat_blocks_of(x_nOI)
    with on_device_of(x_nOI):
        finish_direction_kernel[grid](
            out_nOI,
            x_nOI,
            *vectors,
            used_n.view(torch.uint8),
            x_nOI[0].numel(),
            parts,
            apart,
            SMALLEST=SMALLEST,
            HAS_SIZE=size_n is not None,
            **options,
        )


def flat_blocks_of(x_nOI: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid (blocks of a matrix, matrices) and the launch options."""
    return (triton.cdiv(x_nOI[0].numel(), FLAT_BLOCK), len(x_nOI)), {
        "BLOCK": FLAT_BLOCK,
        "num_warps": WARPS,
    }


def _check_flat(
    op: str, matrices: tuple[Tensor, ...], vectors: tuple[Tensor, ...], flags_n: Tensor
) -> None:
    """Check the arguments of a kernel.

    Raise ValueError if shapes do not fit. Raise NotMadeFor if matrices or vectors are not fp32 or
    not contiguous, if flags are not bool, or if the number of matrices is 0 or above
    :data:`MAX_MATRICES`.
    """
    shape = matrices[0].shape
    everything = (*matrices, *vectors, flags_n)
    if any(x.shape != shape for x in matrices) or any(
        x.shape != shape[:1] for x in (*vectors, flags_n)
    ):
        raise ValueError(
            f"{op}: the shapes of matrices, vectors and flags do not fit, got "
            f"{describe(*everything)}"
        )
    check_device(op, everything, DEVICE_TYPE)
    plain = all(x.is_contiguous() for x in everything) and flags_n.dtype is torch.bool
    plain = plain and all(x.dtype is torch.float32 for x in (*matrices, *vectors))
    if not plain or len(shape) != 3 or not shape.numel() or shape[0] > MAX_MATRICES:
        raise NotMadeFor(
            f"{op}: expected contiguous fp32 [n, O, I] and [n], and bool [n], got "
            f"{describe(*everything)}"
        )
