"""Where ops are tried: (device, backend) pairs, what each offers, and what must hold of one
call."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.kernels.cases import rounding
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.dispatch import BACKENDS, OPS
from ds_kfac.ops.functional import packed_numel
from ds_kfac.ops.triton import MODULES
from tests.ops.calls import Call, counted_rows, normal, some_rows, triangle

OFFERS = {"torch": OPS, "triton": tuple(MODULES), "cuda": CudaOps.OPS}


def pairs(*backends: str) -> list:
    """Test parameters (device, backend, op); those of a GPU are marked."""
    found = []
    for backend in backends:
        for device in ("cpu", "cuda") if backend == "torch" else ("cuda",):
            marks = [pytest.mark.gpu] if device == "cuda" else []
            found += [
                pytest.param(device, backend, op, marks=marks, id=f"{device}-{backend}-{op}")
                for op in OFFERS[backend]
            ]
    return found


def implementations(backend: str) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation; skips with the reason where there is none.

    Not guarded: a backend must do every call of these tests itself.
    """
    try:
        return BACKENDS[backend].load()
    except RuntimeError as problem:
        pytest.skip(f"no {backend} ops: {problem}")


def copied(value: Any) -> Any:
    """Tensors in a structure anew, with their strides. A tensor that is there twice, as a result in
    the place of an argument, is copied once."""
    copies: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda x: copies.setdefault(id(x), copy(x)), value)


def copy(x: Tensor, device: str | None = None) -> Tensor:
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)
    return new.copy_(x)


def poison(value: Any) -> None:
    """NaN, or -1 for integers, in every tensor of a structure."""
    tree_map_only(Tensor, lambda x: x.fill_(float("nan") if x.is_floating_point() else -1), value)


def refill(value: Any, source: Any) -> None:
    """Copies the tensors of a structure into those of another that is shaped alike."""
    targets: list[Tensor] = []
    tree_map_only(Tensor, targets.append, value)
    sources: list[Tensor] = []
    tree_map_only(Tensor, sources.append, source)
    for x, y in zip(targets, sources, strict=True):
        x.copy_(y)


def problems(call: Call, returned: Any, arguments: tuple) -> list[str]:
    """What differs from float64; nothing for a right result."""
    found = []
    for index, (x, wanted) in enumerate(
        zip(call.given(returned, arguments), call.wanted, strict=True)
    ):
        place = f"{call.label}, output {index}"
        if x.shape != wanted.shape:
            found.append(f"{place}: shape {tuple(x.shape)}, not {tuple(wanted.shape)}")
        elif call.allowed == 0.0:
            different = (x != wanted) & ~(x.isnan() & wanted.isnan())
            if x.dtype != wanted.dtype or different.any():
                found.append(
                    f"{place}: {int(different.sum())} of {x.numel()} elements in {x.dtype} differ"
                )
        elif x.numel():
            error = (x.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(
                min=1e-30
            )
            if not error <= call.allowed:
                found.append(f"{place}: error {float(error):.2e}, allowed {call.allowed:.0e}")
    return found


def configured(
    syrk: Any, config: Any, device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int]]
) -> list[str]:
    """What is wrong with products (rows, side) of a SYRK module by one configuration."""
    found = []
    for (rows, dim), masked in product(shapes, (False, True)):
        x_ND = normal(device, rows, dim).to(dtype)
        kept = some_rows(x_ND) if masked else None
        wide = counted_rows(x_ND, kept, bias=True)
        total = torch.zeros(packed_numel(dim + 1), device=device)
        syrk.accumulate(total, x_ND, config, kept=kept, bias=True)
        label = f"{rows} x {dim} {dtype} {'some rows' if masked else ''} {config}"
        call = Call(
            "syrk_accumulate_",
            label,
            (),
            [triangle(wide.T @ wide)],
            lambda x, _: [x],
            rounding(rows, dtype),
        )
        found += problems(call, total, ())
    return found


class _NoReads(TorchDispatchMode):
    """On a CPU: raises where a GPU would have to wait for a value."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.READS:
            raise RuntimeError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def _cuda_waits_are_errors():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def no_waiting(device: str) -> AbstractContextManager:
    """Host synchronisations raise."""
    return _cuda_waits_are_errors() if device == "cuda" else _NoReads()


@contextmanager
def deterministic():
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@contextmanager
def side_stream(device: str):
    """Another stream than the default one, busy for some milliseconds; on a CPU nothing."""
    if device != "cuda":
        with nullcontext():
            yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        yield
    stream.synchronize()
