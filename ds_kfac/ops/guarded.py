"""What becomes of a call that a backend has no code for, and of one that fails: one policy for all backends.

An implementation refuses what it is not made for (a dtype, strides, a size) by raising ``NotMadeFor``
before it writes anything; plain torch, which is made for all of it, then runs instead. Arguments that no implementation
could take, such as shapes that do not fit, are a ValueError from either.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops import functional


class NotMadeFor(ValueError):
    """This implementation has no code for such arguments; nothing was written."""


def guarded(backend: str, op: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation``, with plain torch for what it is not made for.

    Raises:
        RuntimeError: it failed, such as a kernel that does not compile on this machine, and how to do without it.
    """

    @wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return implementation(*args, **kwargs)
        except NotMadeFor:
            pass  # outside of the handler: what torch raises is not said to come from this
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            raise RuntimeError(
                f'{op} by the backend "{backend}" failed: {type(problem).__name__}: {problem}\n'
                'This is a fault of the backend or of its installation; kfac.ops.backend "torch" does without it.'
            ) from problem
        return getattr(functional, op)(*args, **kwargs)

    return run


def of(*tensors: Tensor | None) -> str:
    """Tensors for an error's text."""
    return ", ".join("None" if x is None else f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for x in tensors)


def check_device(op: str, tensors: Sequence[Any], device_type: str | None) -> None:
    """Raises NotMadeFor unless all that are tensors are on one device, of a type; torch judges the others."""
    devices = {x.device for x in tensors if isinstance(x, Tensor)}
    if len(devices) > 1 or any(device.type != (device_type or device.type) for device in devices):
        raise NotMadeFor(f"{op}: expected tensors on one {device_type or ''} device, got {sorted(map(str, devices))}")
