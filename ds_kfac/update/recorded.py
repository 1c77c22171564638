"""Work that is the same in every step, launched as one CUDA graph.

The host needs 10 microseconds for a launch, from Python up to 40, a GPU 2 to 10 for most of a
step's kernels: the 600 of GPT-2 small's layers took the host 40 ms and the device 8 (docs/gpu.md).
A graph launches all of them at once.

What is recorded reads and writes tensors in fixed places and decides nothing on the host. Its
temporaries and results lie in memory that the graph keeps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Recorder = Callable[[Callable[[], T]], tuple[Callable[[], None], T]]
"""Of a function: what repeats it, and its result, which each repetition overwrites. The first has
not happened yet."""

STEADY = 2
"""Calls with the same key that run as they are before one is recorded: they compile kernels and
fill caches."""
ATTEMPTS = 8
"""Recordings after which keys change too often for it: a schedule of betas changes them in every
step."""
RECORDED_NUMEL = 1 << 27
"""Elements of a rank's layers up to which their steps are recorded: with more the device has work
for longer than launches take, and the memory that a graph keeps would be more than a GiB."""
RECORDED_LAYER = 1 << 24
"""Elements of a layer, in the mean of a rank's, from which on that is so however few layers there
are."""


def cuda_graph(function: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """The recorder for GPUs. Waits for the device, once."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # other threads, such as NCCL's watchdog, go on asking for events
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = function()
    finally:
        # where the end of a capture raises torch stays in the capture's stream, and training would
        # go on there, not ordered with what DeepSpeed runs in the default stream
        torch.cuda.set_stream(stream)
    return graph.replay, result


RECORDERS: dict[str, Recorder] = {"cuda": cuda_graph}
"""By type of device."""


class Recorded(Generic[T]):
    """Calls of a function, recorded once their key has stayed the same.

    Args:
        warn: is told if the function cannot be recorded; then it goes on as it is.

    Attributes:
        replays: how many calls were repetitions.
    """

    def __init__(self, recorder: Recorder, warn: Callable[[str], None]) -> None:
        self.recorder, self.warn, self.replays, self._left = recorder, warn, 0, ATTEMPTS
        self.forget()

    def forget(self) -> None:
        """Free what the recording keeps."""
        self._key: Any = None
        self._held: Sequence[Any] = ()
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._result: Any = None

    def __call__(self, function: Callable[[], T], places: Sequence[Any], values: Any) -> T:
        """The function's result.

        Args:
            places: objects whose tensors it uses; another object in a place is another key.
            values: what else decides on what it does, compared.
        """
        key = [*map(id, places)], values
        if key != self._key:
            self.forget()
            self._key, self._held = key, places  # held: else another object could get the same id
        if self._replay is None:
            self._calls += 1
            if self._calls <= STEADY or not self._left:
                return function()
            self._left -= 1
            try:
                self._replay, self._result = self.recorder(function)
            except RuntimeError as problem:
                self._left = 0
                why = (str(problem) or type(problem).__name__).splitlines()[0]
                self.warn(
                    "ds_kfac: a step cannot be recorded as a CUDA graph and is launched kernel by "
                    "kernel, which is "
                    f"slower: {why}"
                )
                return function()
        self._replay()
        self.replays += 1
        return self._result
