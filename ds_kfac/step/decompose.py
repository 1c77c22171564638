"""Runs decompositions in the background of training steps, on a thread or a stream of their own."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class _Job:
    """A submitted function and, once ``done``, its results or error.

    Attributes:
        work: held until all its results are dropped, not until it returns: a GPU may still read its tensors.
        wanted: number of results that are not dropped yet.
        start, end: on a GPU, event in the submitting stream that it waits for; event in its own stream after its work.
    """

    work: Callable[[], Sequence[Any]]
    wanted: int
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    results: Sequence[Any] = ()
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, stream: torch.cuda.Stream | None) -> None:
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None and self.start is not None:
                    stream.wait_event(self.start)
                self.results = self.work()
                self.end = None if stream is None else stream.record_event()
        except Exception as error:  # not swallowed: raised by Refresher.result
            self.error = error
        self.done.set()


class Refresher:
    """Runs work in the background. The caller takes a result at a fixed later step, and waits if it is not done, so
    what a training run computes does not depend on timing.

    On a GPU the work runs in a stream of its own, after what the submitting stream had queued; elsewhere on one thread
    with one core. Work may only read tensors that nobody writes. Factors are replaced, never changed in place. A basis
    changes in place once the next refresh of its factor, and so the work that reads it, is done (``groups.py``).

    Attributes:
        jobs: key -> its submitted work, and the place of the key's result among the work's results.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.jobs: dict[str, tuple[_Job, int]] = {}
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._stop: Callable[[], Any] | None = None

    def submit(self, keys: Sequence[str], work: Callable[[], Sequence[Any]]) -> None:
        """Run ``work`` once, without gradients; it returns a result for each key. :meth:`result` raises its errors."""
        again = [key for key in keys if key in self.jobs]
        assert not again, f"{', '.join(again)} is submitted twice"
        if not keys:
            return
        event = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        job = _Job(work, len(keys), event)
        self.jobs |= {key: (job, place) for place, key in enumerate(keys)}
        if self._stop is None:
            self._start()
        self._queue.put(job)

    def give(self, key: str, result: Any) -> None:
        """Store a result that was computed elsewhere, such as one from a checkpoint."""
        job = _Job(lambda: (), 1, results=(result,))
        job.done.set()
        self.jobs[key] = job, 0

    def result(self, key: str) -> Any:
        """The result for a key, which stays until it is dropped; waits until it is computed.

        Raises:
            RuntimeError: the work failed.
        """
        job, place = self.jobs[key]
        job.done.wait()
        if job.error is not None:
            raise RuntimeError(f"ds_kfac: the refresh of {key} failed") from job.error
        if job.end is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(job.end)
            # allocated in the side stream: without this the allocator could hand out their memory while the current
            # stream still reads it
            for tensor in _tensors(job.results[place]):
                tensor.record_stream(current)
        return job.results[place]

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these keys' results. Work that has not begun and of which no result is wanted will not run."""
        for key in keys:
            if key in self.jobs:
                self.jobs.pop(key)[0].wanted -= 1

    def clear(self) -> None:
        """Drop everything."""
        self.drop(list(self.jobs))

    def close(self) -> None:
        """Drop everything and end the thread, which a later :meth:`submit` would start again."""
        self.clear()
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _start(self) -> None:
        threads, ready = torch.get_num_threads(), threading.Event()
        thread = threading.Thread(
            target=_serve, args=(self._queue, self.device, ready), name="ds_kfac refresh", daemon=True
        )
        thread.start()
        ready.wait()
        torch.set_num_threads(threads)  # the thread's own number is also what later threads would start with
        self._stop = weakref.finalize(self, _stop, self._queue, thread)  # also when the process ends


def _serve(queue: "SimpleQueue[_Job | None]", device: torch.device, ready: threading.Event) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is None:
        torch.get_num_threads()  # once: a thread first takes the process's number, at some later point if not now
        torch.set_num_threads(1)
    ready.set()
    while (job := queue.get()) is not None:
        if job.wanted:
            job.run(stream)
        del job  # while waiting for the next, hold no tensors


def _stop(queue: "SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        queue.put(None)
    thread.join()


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in dataclasses, sequences and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for part in fields(value) for tensor in _tensors(getattr(value, part.name))]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (tuple, list)) else []
