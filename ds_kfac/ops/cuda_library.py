"""The compiled library of ``csrc/cuda``: found or built, loaded without a driver, its error codes raised by name."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int}
_SIGNATURES = {
    "pack": "piippppp",
    "unpack": "piippppp",
    "ema_update": "ppippppppp",
}
"""Launcher -> a letter of ``_TYPES`` per argument; see the sources."""


class CudaError(RuntimeError):
    """What a launcher returned, e.g. ``cudaErrorInsufficientDriver``."""


class CudaLibrary:
    """The launchers; :meth:`launch` raises what they return."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        for name, signature in _SIGNATURES.items():
            function = self._function(name)
            function.argtypes, function.restype = [_TYPES[letter] for letter in signature], ctypes.c_int
        for name in ("error_name", "error_text"):
            function = self._function(name)
            function.argtypes, function.restype = [ctypes.c_int], ctypes.c_char_p

    def launch(self, name: str, *arguments: object) -> None:
        """Raises CudaError, with the error's name, if the kernel could not be launched."""
        error = self._function(name)(*arguments)
        if error:
            code, text = (self._function(part)(error).decode() for part in ("error_name", "error_text"))
            raise CudaError(f"{name}: {code} ({error}): {text}")

    def _function(self, name: str):
        return getattr(self._library, f"ds_kfac_cuda_{name}")


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def integers(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)
