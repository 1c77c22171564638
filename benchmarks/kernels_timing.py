"""Medians and spread of functions called in turn, and the roofline of the machine measured in the same run."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

CACHE_BYTES = 1 << 28
"""More than any cache: written between calls on a GPU, and what a copy is measured with."""


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
    """Times calls on one device; on a GPU by events, with a cold cache, queued behind other work."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.flush = torch.empty(CACHE_BYTES // 4, device=device) if self.cuda else None

    def once(self, function: Callable[[], Any]) -> float:
        """Seconds of one call."""
        if not self.cuda:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        assert self.flush is not None
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start_event.record()
        function()
        end_event.record()
        end_event.synchronize()
        return start_event.elapsed_time(end_event) / 1000

    def compare(self, functions: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, Times]:
        """Each called in turn, so that noise hits all of them, for about ``seconds`` each, at least 5 times."""
        for function in functions.values():
            self.once(function)
        found: dict[str, list[float]] = {name: [] for name in functions}
        start = time.perf_counter()
        while len(next(iter(found.values()))) < 5 or time.perf_counter() - start < seconds * len(functions):
            for name, function in functions.items():
                found[name].append(self.once(function))
        return {name: _times(values) for name, values in found.items()}

    def roofline(self, dtype: torch.dtype, seconds: float) -> Roofline:
        """Copy bandwidth and matrix product, by the library."""
        device = "cuda" if self.cuda else "cpu"
        source = torch.zeros(CACHE_BYTES // 4, device=device)
        target, side = torch.empty_like(source), 8192 if self.cuda else 2048
        x = torch.randn(side, side, device=device).to(dtype)
        times = self.compare({"copy": lambda: target.copy_(source), "product": lambda: x @ x}, seconds)
        return Roofline(
            2 * CACHE_BYTES / times["copy"].median, 2 * side**3 / times["product"].median,
            str(dtype).removeprefix("torch."),
        )  # fmt: skip


def _times(values: list[float]) -> Times:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Times(median, low, high, len(values))
