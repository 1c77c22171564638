"""What all Triton kernels share: interpreted or compiled, the matrix product, numbers on the device."""

# mypy: disable-error-code="arg-type, call-arg, misc"
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ds_kfac.ops.check import check_device

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""Fixed when this module is imported, like the kind of every kernel."""
DEVICE_TYPE = None if INTERPRET else "cuda"
"""Where kernels run; None: anywhere."""
ASSUMED_MULTIPROCESSORS = 132
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of rows that are multiplied."""


@triton.jit
def dot(a, b, acc):
    """acc + a b with fp32 sums; fp32 operands are not rounded. The interpreter has no 16-bit products."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def scalar(value, IN_MEMORY: tl.constexpr):
    """A number that came as an argument, or as a pointer to it, which needs no host synchronisation."""
    if IN_MEMORY:
        return tl.load(value).to(tl.float32)
    else:
        return value


def check_devices(op: str, *arguments: object) -> None:
    """Raises NotMadeFor unless all tensors are where kernels run."""
    check_device(op, arguments, DEVICE_TYPE)


def architecture() -> int:
    """80, 90, 100 of the current device; under the interpreter any will do."""
    return 90 if INTERPRET else triton.runtime.driver.active.get_current_target().arch


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, whatever its arguments live on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
