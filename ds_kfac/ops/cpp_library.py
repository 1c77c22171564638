"""The compiled C++ ops of csrc/cpu, and how their arguments are passed."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ds_kfac.ops.builders import CPUBuilder

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "pack": "pilppppi",
    "unpack": "pilpppii",
    "add_lower": "ppllfi",
    "ema_update": "lpppppppi",
    "similarity": "lppppppi",
    "eigen_scale_dot": "ppllppfilpi",
    "corrected_scale_dot": "ppllppfffilpi",
    "adam_scale": "pppppplfifffii",
}
"""Function -> a letter of ``_TYPES`` per argument; see the sources."""


@cache
def library() -> ctypes.CDLL:
    """Loaded, with the types of its functions.

    Raises:
        RuntimeError: why not.
    """
    try:
        loaded = CPUBuilder().load()
        for name, signature in _SIGNATURES.items():
            function = getattr(loaded, f"ds_kfac_{name}")
            function.argtypes, function.restype = [_TYPES[letter] for letter in signature], None
    except AttributeError as problem:
        raise RuntimeError(f"its library does not load: {problem}") from problem
    return loaded


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Addresses; null for None."""
    return (ctypes.c_void_p * len(tensors))(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])


def integers(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def plain(*tensors: Tensor) -> bool:
    """Whether C++ may read and write them as they are."""
    return all(x.dtype is torch.float32 and x.is_contiguous() and x.device.type == "cpu" for x in tensors)
