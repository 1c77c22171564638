"""Of n matrices of one shape, each in one pass: division by Adam's moments, their update, and the size of a direction.

At the top what all Triton kernels share. Shape suffixes: O, I the sides of a matrix, n matrices.
"""

# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc"
import math
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ds_kfac.ops.check import NotMadeFor, check_device, of
from ds_kfac.ops.functional import SMALLEST, Scalar, in_fp32

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""Fixed when this module is imported, like the kind of every kernel."""
DEVICE_TYPE = None if INTERPRET else "cuda"
"""Where kernels run; None: anywhere."""
WARPS = 8
MAX_MATRICES = 65535
"""Of a launch."""
FLAT_BLOCK = 2048
"""Elements of a program, 8 a thread: matrices are read in one piece."""
WAITING = (torch.float32, torch.bfloat16, torch.float16)


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


@triton.jit
def flat_place(numel, BLOCK: tl.constexpr):
    """Of this program's elements of a matrix: which, int64, and what is inside."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return element, element < numel


@triton.jit(do_not_specialize=["updates_ptr", "usable_ptr", "numel"])
def adam_scale_kernel(
    direction_ptr, waiting_ptr, x_ptr, first_ptr, second_ptr, updates_ptr, usable_ptr, scale,
    beta1, beta2, log_beta1, log_beta2, eps, numel, SCALE_IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` elements of one matrix a program; matrices follow each other."""
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
    """See ``ops/reference.py``. All contiguous, and fp32 but for ``usable`` and what waits. Cost: 16 n O I bytes, and
    what waits."""
    whole = direction_nOI, x_nOI, first_nOI, second_nOI
    _check_adam("adam_scale_", whole, waiting_nOI, updates_n, usable_n, (*betas, eps), scale)
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
    """As :func:`adam_scale_kernel`. A matrix's first program counts."""
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
    """See ``ops/reference.py``, and :func:`adam_scale_`. Cost: 16 n O I bytes, and what waits."""
    _check_adam("adam_fold_", (first_nOI, second_nOI), waiting_nOI, updates_n, usable_n, betas)
    grid, options = flat_blocks_of(first_nOI)
    with on_device_of(first_nOI):
        adam_fold_kernel[grid](
            first_nOI, second_nOI, updates_n, waiting_nOI, usable_n.view(torch.uint8), *_decays(betas)[:2],
            first_nOI[0].numel(), **options,
        )  # fmt: skip


# vectors are views into those of all layers: specialised, each alignment would be another compilation
@triton.jit(
    do_not_specialize=["norm_ptr", "size_ptr", "target_ptr", "full_ptr", "bound_ptr", "replacement_ptr", "numel"]
)
def finish_direction_kernel(
    x_ptr, norm_ptr, size_ptr, target_ptr, full_ptr, bound_ptr, replacement_ptr, shift, numel,
    SMALLEST: tl.constexpr, HAS_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As :func:`adam_scale_kernel`."""
    element, inside = flat_place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    at = matrix * numel + element
    norm, scale = tl.load(norm_ptr + matrix), tl.load(target_ptr + matrix)
    if HAS_SIZE:
        part = tl.load(size_ptr + matrix) / tl.load(full_ptr + matrix)
        scale = scale * tl.where(part > 1.0, 1.0, part) / tl.maximum(norm, SMALLEST)  # tl.minimum would drop a NaN
    good = norm < tl.load(bound_ptr + matrix)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(x_ptr + at, tl.where(good, x * scale + shift, tl.load(replacement_ptr + matrix)), mask=inside)


def finish_direction_(
    x_nOI: Tensor, norm_n: Tensor, size_n: Tensor | None, target_n: Tensor, full_n: Tensor, bound_n: Tensor,
    replacement_n: Tensor, shift: float,
) -> None:  # fmt: skip
    """See ``ops/reference.py``. fp32, contiguous. Cost: 8 n O I bytes."""
    vectors = norm_n, norm_n if size_n is None else size_n, target_n, full_n, bound_n, replacement_n
    _check_flat("finish_direction_", (x_nOI,), vectors, (shift,))
    grid, options = flat_blocks_of(x_nOI)
    with on_device_of(x_nOI):
        finish_direction_kernel[grid](
            x_nOI, *vectors, shift, x_nOI[0].numel(), SMALLEST=SMALLEST, HAS_SIZE=size_n is not None, **options
        )


def flat_blocks_of(x_nOI: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, blocks of a matrix and matrices; and how large a block is."""
    return (triton.cdiv(x_nOI[0].numel(), FLAT_BLOCK), len(x_nOI)), {"BLOCK": FLAT_BLOCK, "num_warps": WARPS}


def _check_flat(op: str, matrices: tuple[Tensor, ...], vectors: tuple[Tensor, ...], numbers: tuple) -> None:
    """Raises ValueError unless they fit; NotMadeFor: not fp32, with gaps, none, more than a launch has, or tensors for
    numbers."""
    shape = matrices[0].shape
    if any(x.shape != shape for x in matrices) or any(x.shape != shape[:1] for x in vectors):
        raise ValueError(f"{op}: moments, vectors and matrices do not fit, got {of(*matrices, *vectors)}")
    check_device(op, (*matrices, *vectors), DEVICE_TYPE)
    plain = all(x.dtype is torch.float32 and x.is_contiguous() for x in (*matrices, *vectors))
    if not plain or len(shape) != 3 or not shape.numel() or shape[0] > MAX_MATRICES:
        raise NotMadeFor(f"{op}: expected contiguous fp32 [n, O, I] and [n], got {of(*matrices, *vectors)}")
    if any(isinstance(number, Tensor) for number in numbers):
        raise NotMadeFor(f"{op}: expected betas, eps or shift as numbers, got tensors")


def _check_adam(
    op: str, matrices: tuple[Tensor, ...], waiting: Tensor, updates: Tensor, usable: Tensor, numbers: tuple,
    scale: Scalar = 1.0,
) -> None:  # fmt: skip
    """As :func:`_check_flat`."""
    _check_flat(op, matrices, (updates,), numbers)
    check_device(op, (updates, usable, waiting, scale), DEVICE_TYPE)
    if waiting.shape != matrices[0].shape or usable.shape != updates.shape:
        raise ValueError(f"{op}: what waits or is usable does not fit, got {of(waiting, usable, matrices[0])}")
    if not waiting.is_contiguous() or waiting.dtype not in WAITING or usable.dtype is not torch.bool:
        raise NotMadeFor(f"{op}: expected a contiguous buffer and bool, got {of(waiting, usable)}")


def _decays(betas: tuple[float, float]) -> list[float]:
    """And their logarithms."""
    decays = in_fp32(betas)
    return [*decays, *(math.log(decay) if decay > 0 else -math.inf for decay in decays)]
