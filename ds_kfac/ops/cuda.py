"""Backend ``cuda``: ops that process many layers in one launch, for fp32 state on one GPU. The
kernels are in csrc/cuda.

Work is queued on the current stream, and the host does not wait for it. Every op is deterministic.
Tensors that are not fp32, not contiguous or not on one GPU raise NotMadeFor, see ``ops/check.py``.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops import build, check
from ds_kfac.ops.check import NotMadeFor, check_device, describe
from ds_kfac.ops.functional import Tensors, packed_numel

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int}
_SIGNATURES = {"pack": "piippppp", "unpack": "piippppp", "ema_update": "ppippppppp"}
"""dict from the name of a launcher in csrc/cuda to a string with one letter per argument.
``_TYPES`` has the type for each letter. The last argument is the stream."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_DIM = 1 << 20


class CudaError(RuntimeError):
    """An error that a launcher returned, such as ``cudaErrorInsufficientDriver``."""


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def integers(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


class CudaOps:
    """The ops of a loaded library.

    Args:
        device_type: "cuda", or "cpu" for the emulated kernels that tests use.
    """

    OPS = ("symmetric_pack_into_", "symmetric_unpack_from", "ema_update_")

    def __init__(self, library: ctypes.CDLL, device_type: str = "cuda"):
        self._library = library
        self.device_type = device_type
        for name, signature in _SIGNATURES.items():
            function = self._function(name)
            function.argtypes = [_TYPES[letter] for letter in signature]
            function.restype = ctypes.c_int
        for name in ("error_name", "error_text"):
            function = self._function(name)
            function.argtypes = [ctypes.c_int]
            function.restype = ctypes.c_char_p

    def symmetric_pack_into_(
        self, out: Tensor, starts: Sequence[int], matrices_DD: Tensors
    ) -> None:
        """See ``ops/functional.py``. Matrices need contiguous rows, and ``out`` must be
        contiguous."""
        dims = [len(x_DD) for x_DD in matrices_DD]
        self._check_flat("symmetric_pack_into_", out, starts, dims)
        for x_DD, dim in zip(matrices_DD, dims, strict=True):
            if x_DD.shape != (dim, dim):
                raise ValueError(
                    f"symmetric_pack_into_: expected square matrices, got {describe(x_DD)}"
                )
            if x_DD.dtype != torch.float32 or (dim > 1 and x_DD.stride(1) != 1):
                raise NotMadeFor(
                    "symmetric_pack_into_: expected fp32 matrices with contiguous rows, got "
                    f"{describe(x_DD)}"
                )
        strides = integers([x_DD.stride(0) for x_DD in matrices_DD])
        self._launch(
            "pack",
            [out, *matrices_DD],
            out.data_ptr(),
            KINDS[out.dtype],
            len(dims),
            pointers(matrices_DD),
            strides,
            integers(starts),
            integers(dims),
        )

    def symmetric_unpack_from(
        self, packed: Tensor, starts: Sequence[int], dims: Sequence[int]
    ) -> list[Tensor]:
        self._check_flat("symmetric_unpack_from", packed, starts, dims)
        matrices = [
            torch.empty(dim, dim, device=packed.device, dtype=torch.float32) for dim in dims
        ]
        self._launch(
            "unpack",
            [packed, *matrices],
            packed.data_ptr(),
            KINDS[packed.dtype],
            len(dims),
            pointers(matrices),
            integers(dims),
            integers(starts),
            integers(dims),
        )
        return matrices

    def ema_update_(
        self,
        averages_P: Tensors,
        sums_P: Tensors,
        counts: Tensors,
        updates: Tensors,
        decays: Sequence[float],
    ) -> Tensor:
        numels = [average_P.numel() for average_P in averages_P]
        tensors = [*averages_P, *sums_P, *counts, *updates]
        lengths = {len(averages_P), len(sums_P), len(counts), len(updates), len(decays)}
        if len(lengths) > 1 or numels != [sum_P.numel() for sum_P in sums_P]:
            raise ValueError(
                f"ema_update_: arguments do not fit together: averages of {numels} elements, sums "
                f"of {[sum_P.numel() for sum_P in sums_P]}, {len(counts)} counts, {len(updates)} "
                f"updates, {len(decays)} decays"
            )
        wide = [scalar for scalar in (*counts, *updates) if scalar.numel() != 1]
        if wide:
            raise ValueError(
                "ema_update_: counts and updates must have one element each, got "
                f"{describe(wide[0])}"
            )
        for tensor in tensors:
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise NotMadeFor(
                    f"ema_update_: expected contiguous fp32 tensors, got {describe(tensor)}"
                )
        if not tensors:
            return torch.empty(0, dtype=torch.bool, device=self.device_type)
        used = torch.empty(len(numels), dtype=torch.bool, device=averages_P[0].device)
        weights = torch.empty(len(numels), device=used.device, dtype=torch.float32)
        self._launch(
            "ema_update",
            tensors,
            used.data_ptr(),
            weights.data_ptr(),
            len(numels),
            pointers(averages_P),
            pointers(sums_P),
            integers(numels),
            pointers(counts),
            pointers(updates),
            (ctypes.c_float * len(decays))(*decays),
        )
        return used

    def _function(self, name: str):
        return getattr(self._library, f"ds_kfac_cuda_{name}")

    def _launch(self, name: str, tensors: Sequence[Tensor], *arguments: object) -> None:
        """Launch on the current stream of the tensors' device. All tensors must be on one device.
        Raise CudaError if the launch fails."""
        check_device(name, tensors, self.device_type)
        if self.device_type != "cuda":
            error = self._function(name)(*arguments, None)
        else:
            with torch.cuda.device(tensors[0].device):
                error = self._function(name)(*arguments, torch.cuda.current_stream().cuda_stream)
        if error:
            code, text = (
                self._function(part)(error).decode() for part in ("error_name", "error_text")
            )
            raise CudaError(f"{name}: {code} ({error}): {text}")

    def _check_flat(
        self, op: str, flat: Tensor, starts: Sequence[int], dims: Sequence[int]
    ) -> None:
        if flat.ndim != 1 or not flat.is_contiguous() or flat.dtype not in KINDS:
            raise NotMadeFor(
                f"{op}: expected a flat contiguous tensor of fp32, bf16 or fp16, got "
                f"{describe(flat)}"
            )
        for start, dim in zip(starts, dims, strict=True):
            if dim > MAX_DIM:
                raise NotMadeFor(f"{op}: expected sides up to {MAX_DIM}, got {dim}")
            if start < 0 or dim < 0 or start + packed_numel(dim) > flat.numel():
                raise ValueError(
                    f"{op}: a packed triangle of side {dim} that starts at element {start} does "
                    f"not fit into {flat.numel()} elements"
                )


def load() -> Mapping[str, Callable[..., Any]]:
    """Return a mapping from op to implementation. The library is built at first use. Raise
    RuntimeError with the reason if the library cannot run here."""
    reason = check.gpu_problem()
    if reason:
        raise RuntimeError(reason)
    ops = _load()
    return {name: getattr(ops, name) for name in CudaOps.OPS}


@cache
def _load() -> CudaOps:
    try:
        return CudaOps(build.load(check.gpu_architecture()))
    except AttributeError as problem:
        raise RuntimeError(f"its library does not load: {problem}") from problem
