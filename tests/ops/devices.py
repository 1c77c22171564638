"""What a GPU has and a CPU lacks, for tests that run on both: waiting, streams, another order of
sums."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.calls import tensors_of


def poison(value: Any) -> None:
    """NaN, or -1 for integers, in every tensor of a structure."""
    for x in tensors_of(value):
        x.fill_(float("nan") if x.is_floating_point() else -1)


def refill(value: Any, source: Any) -> None:
    """Copies the tensors of a structure into those of another that is shaped alike."""
    for x, y in zip(tensors_of(value), tensors_of(source), strict=True):
        x.copy_(y)


class _NoReads(TorchDispatchMode):
    """On a CPU: raises where a GPU would have to wait for a value."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.READS:
            raise RuntimeError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def _cuda_waits_are_errors() -> Iterator[None]:
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
def deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@contextmanager
def side_stream(device: str) -> Iterator[None]:
    """Another stream than the default one, busy for some milliseconds; on a CPU nothing."""
    if device != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        yield
    stream.synchronize()
