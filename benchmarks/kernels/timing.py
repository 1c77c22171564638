"""Medians and spread of functions called in turn, and the machine's roofline in the same run."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

CACHE_BYTES = 1 << 28
"""More than any cache: read between calls on a GPU, and what a copy is measured with."""
SLOW = 0.5
"""Seconds of a call from which on a few will do, and from a tenth on of which launching it is
nothing."""
CYCLES_PER_SECOND = 2_000_000_000
"""At least a GPU's clock rate: a wait of so many cycles a second is not shorter than a second."""


@dataclass(frozen=True)
class Times:
    """Seconds: median, first and third quartile, number of calls."""

    median: float
    low: float
    high: float
    calls: int


@dataclass(frozen=True)
class Roofline:
    """Attributes:
    bytes_per_second: of a copy, read and write counted.
    flops_per_second: of a large square product in ``dtype``.
    """

    bytes_per_second: float
    flops_per_second: float
    dtype: str

    def bound(self, nbytes: int, flops: int) -> float:
        """Seconds below which this machine cannot get."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


class Clock:
    """Times calls on one device.

    On a GPU by events, with a cold cache (another buffer was read: writing one would leave the
    cache full of what must first be written back), and behind a wait that is longer than the host
    needs to queue the call, so that launches are not timed, unless the call itself waits for the
    device.
    """

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.flush = torch.zeros(CACHE_BYTES // 4, device=device) if self.cuda else None

    def once(self, function: Callable[[], Any], queueing: float = 0.0) -> float:
        """Return the seconds of one call.

        Args:
            queueing: seconds that the host needs to queue it.
        """
        if not self.cuda:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        assert self.flush is not None
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.sum()
        torch.cuda._sleep(int(2 * queueing * CYCLES_PER_SECOND))
        start_event.record()
        function()
        end_event.record()
        end_event.synchronize()
        return start_event.elapsed_time(end_event) / 1000

    def queueing(self, function: Callable[[], Any]) -> float:
        """Return the seconds that the host needs to queue a call, the least of three tries."""
        if not self.cuda:
            return 0.0
        found = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            found.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return min(found)

    def compare(
        self, functions: Mapping[str, Callable[[], Any]], seconds: float
    ) -> dict[str, Times]:
        """Call the functions in turn, so that noise hits all of them, for ``seconds`` each.

        Each is called at least 5 times; at least twice if a call takes more than :data:`SLOW`.
        """
        first = {name: self.once(function) for name, function in functions.items()}
        least = 2 if max(first.values()) > SLOW else 5
        queueing = {
            name: self.queueing(functions[name]) if first[name] < SLOW / 10 else 0.0
            for name in functions
        }
        found: dict[str, list[float]] = {name: [] for name in functions}
        start = time.perf_counter()
        while len(
            next(iter(found.values()))
        ) < least or time.perf_counter() - start < seconds * len(functions):
            for name, function in functions.items():
                found[name].append(self.once(function, queueing[name]))
        return {name: _times(values) for name, values in found.items()}

    def roofline(self, dtype: torch.dtype, seconds: float) -> Roofline:
        """Copy bandwidth and matrix product, by the library."""
        device = "cuda" if self.cuda else "cpu"
        source = torch.zeros(CACHE_BYTES // 4, device=device)
        target, side = torch.empty_like(source), 8192 if self.cuda else 2048
        x = torch.randn(side, side, device=device).to(dtype)
        times = self.compare(
            {"copy": lambda: target.copy_(source), "product": lambda: x @ x}, seconds
        )
        return Roofline(
            2 * CACHE_BYTES / times["copy"].median,
            2 * side**3 / times["product"].median,
            str(dtype).removeprefix("torch."),
        )


def _times(values: list[float]) -> Times:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Times(median, low, high, len(values))
