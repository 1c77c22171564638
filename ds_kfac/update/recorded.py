"""If the work of a step is the same in every step, launch it as one CUDA graph.

Launching a kernel takes the host 10 microseconds, and up to 40 from Python, but a GPU runs most
kernels of a step in only 2 to 10 microseconds. Launching the 600 kernels for GPT-2 small's layers
took the host 40 ms, and running them took the device 8 ms (docs/gpu.md). A graph launches all
kernels at once.

A recorded function must read and write tensors at fixed addresses, and must not decide anything on
the host. The graph keeps the memory of its temporaries and results.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Recorder = Callable[[Callable[[], T]], tuple[Callable[[], None], T]]
"""Function that records another function and returns a pair (replay, result). Each call of
``replay`` repeats the function and overwrites the result. Recording does not execute the function,
so the result is valid only after the first replay."""

STEADY = 2
"""Number of calls with the same key that are executed normally before a call is recorded. These
calls compile kernels and fill caches."""
ATTEMPTS = 8
"""Largest number of times that a function is recorded. After that many recordings its key evidently
changes too often, and the function is never recorded again. For example, a schedule of betas
changes the key in every step."""
RECORDED_NUMEL = 1 << 27
"""A rank records its steps only if its layers have at most this many elements in total. With more
elements, kernels run longer than their launches take, and a graph would keep more than a GiB."""
RECORDED_LAYER = 1 << 24
"""A rank records its steps only if its layers have at most this many elements on average. With
larger layers, kernels run longer than their launches take, even if there are few layers."""


def cuda_graph(function: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Record a function as a CUDA graph, see :data:`Recorder`. Waits for the device once."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        # thread_local, because other threads, such as NCCL's watchdog, continue to query events
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = function()
    finally:
        # If the end of a capture raises an error, torch stays in the capture's stream. Training
        # would continue in that stream, and would not wait for DeepSpeed's work in the default
        # stream.
        torch.cuda.set_stream(stream)
    return graph.replay, result


RECORDERS: dict[str, Recorder] = {"cuda": cuda_graph}
"""Dict from device type to the recorder for devices of this type."""


class Recorded(Generic[T]):
    """Executes a function, and replays it from a recording once calls repeat the same work.

    A call repeats the previous call if both have the same key. The key consists of the objects
    whose tensors the function uses, and of the values on which the function depends.

    Args:
        recorder: records a function.
        warn: called with a message if the function cannot be recorded. In this case the function is
            always executed normally.

    Attributes:
        replays: number of calls that were replayed.
    """

    def __init__(self, recorder: Recorder, warn: Callable[[str], None]) -> None:
        self.recorder = recorder
        self.warn = warn
        self.replays = 0
        self._attempts_left = ATTEMPTS
        self.forget()

    def forget(self) -> None:
        """Free the recording and its memory."""
        self._objects: Sequence[Any] = ()
        self._values: Any = None
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._result: Any = None

    def __call__(self, function: Callable[[], T], places: Sequence[Any], values: Any) -> T:
        """Execute or replay the function, and return its result.

        Args:
            places: objects whose tensors the function uses, compared by identity.
            values: everything else on which the function depends, compared by ``==``.
        """
        if not self._has_key(places, values):
            self.forget()
            self._objects = tuple(places)
            self._values = values
        if self._replay is None:
            self._calls += 1
            if self._calls <= STEADY or not self._attempts_left:
                return function()
            self._attempts_left -= 1
            try:
                self._replay, self._result = self.recorder(function)
            except RuntimeError as problem:
                self._attempts_left = 0
                why = (str(problem) or type(problem).__name__).splitlines()[0]
                self.warn(
                    "ds_kfac: a step cannot be recorded as a CUDA graph, so its kernels are "
                    f"launched one by one, which is slower: {why}"
                )
                return function()
        self._replay()
        self.replays += 1
        return self._result

    def _has_key(self, places: Sequence[Any], values: Any) -> bool:
        """Whether the previous call had these objects and values."""
        if len(places) != len(self._objects):
            return False
        same_objects = all(one is other for one, other in zip(places, self._objects, strict=True))
        return same_objects and bool(values == self._values)
