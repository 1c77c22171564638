"""Decompositions: here and now, or in the background of the training steps, on a thread or a stream of their own."""

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
    """One piece of work and, once ``done``, its results or error.

    Attributes:
        work: held until all its results are dropped, not until it returns: a stream may still read what it refers to.
        wanted: results that are not dropped.
        start, end: on a GPU, where in the submitting stream it may begin, and where in its own it ended.
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
    """Runs work in the background; the caller asks for a result at a fixed later step, early or late as it may be
    done: what a training run computes does not depend on timing.

    On a GPU the work runs in a stream that starts where the submitting stream was, elsewhere on one thread with one
    core. Work must only read what nobody writes to; as factors and bases are replaced and never changed in place, it
    may be anything bound at submission.

    Attributes:
        jobs: key -> what was submitted and not dropped, and which of its results is meant.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.jobs: dict[str, tuple[_Job, int]] = {}
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._stop: Callable[[], Any] | None = None

    def submit(self, keys: Sequence[str], work: Callable[[], Sequence[Any]]) -> None:
        """Have ``work`` done once, without gradients, which gives a result per key. What it raises is raised when a
        result is asked for."""
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
        """Put a result there that was computed elsewhere, as if it had been submitted."""
        job = _Job(lambda: (), 1, results=(result,))
        job.done.set()
        self.jobs[key] = job, 0

    def result(self, key: str) -> Any:
        """Of what was submitted under ``key``; waits for it. It stays until it is dropped.

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
            for tensor in _tensors(job.results[place]):  # allocated in the side stream, freed only after this one's use
                tensor.record_stream(current)
        return job.results[place]

    def drop(self, keys: Iterable[str]) -> None:
        """Forget results that have been used, and work of which nothing is wanted any more."""
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
