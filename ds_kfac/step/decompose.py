"""Decompositions: here and now, or in the background of the training steps, on a thread or a stream of their own."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.curvature.eigen import Refreshed

T = TypeVar("T")


@dataclass(eq=False)
class _Job(Generic[T]):
    """One piece of work and, once ``done``, its result or error.

    Attributes:
        work: held until dropped, not until it returns: a stream may still read what it refers to.
        start, end: on a GPU, where in the submitting stream it may begin, and where in its own it ended.
        dropped: nobody wants it any more.
    """

    key: str
    work: Callable[[], T] | None
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    result: T | None = None
    error: Exception | None = None
    dropped: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, stream: torch.cuda.Stream | None = None) -> None:
        assert self.work is not None
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None and self.start is not None:
                    stream.wait_event(self.start)
                self.result = self.work()
                self.end = None if stream is None else stream.record_event()
        except Exception as error:  # not swallowed: raised by result
            self.error = error
        self.done.set()


class Refresher(Generic[T]):
    """Runs work in the background; the caller asks for a result at a fixed later step, early or late as it may be
    done: what a training run computes does not depend on timing.

    On a GPU the work runs in a stream that starts where the submitting stream was, elsewhere on one thread with one
    core. Work must only read what nobody writes to; as state here is replaced and never changed in place, it may be
    anything bound at submission.

    Attributes:
        jobs: what was submitted and not dropped, by key.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.jobs: dict[str, _Job[T]] = {}
        self._queue: SimpleQueue[_Job[T] | None] = SimpleQueue()
        self._stop: Callable[[], Any] | None = None

    def submit(self, key: str, work: Callable[[], T]) -> None:
        """Have ``work`` done, without gradients. What it raises is raised when its result is asked for."""
        assert key not in self.jobs, f"{key} is submitted twice"
        event = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        job = self.jobs[key] = _Job(key, work, event)
        if self._stop is None:
            self._start()
        self._queue.put(job)

    def submit_together(self, keys: Sequence[str], work: Callable[[], Sequence[T]]) -> None:
        """Have ``work`` done once, which gives a result per key, by the first of them that is not dropped."""
        shared: _Job[Sequence[T]] = _Job("", work)
        for place, key in enumerate(keys):
            self.submit(key, partial(_of, shared, place))

    def give(self, key: str, result: T) -> None:
        """Put a result there that was computed elsewhere, as if it had been submitted."""
        job = self.jobs[key] = _Job(key, None, result=result)
        job.done.set()

    def result(self, key: str) -> T:
        """Of what was submitted under ``key``; waits for it. It stays until it is dropped.

        Raises:
            RuntimeError: the work failed.
        """
        job = self.jobs[key]
        job.done.wait()
        if job.error is not None:
            raise RuntimeError(f"ds_kfac: the refresh of {key} failed") from job.error
        if job.end is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(job.end)
            for tensor in _tensors(job.result):  # allocated in the side stream, freed only after this one's use
                tensor.record_stream(current)
        return job.result  # type: ignore[return-value]

    @property
    def pending(self) -> tuple[str, ...]:
        """Keys of what was submitted and not dropped, in that order."""
        return tuple(self.jobs)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget results that have been used, and work that is no longer wanted."""
        for key in keys:
            job = self.jobs.pop(key, None)
            if job is not None:
                job.dropped = True

    def clear(self) -> None:
        """Drop everything."""
        self.drop(self.pending)

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


def _of(shared: _Job[Sequence[T]], place: int) -> T:
    """One result of work that is done once, also if it fails."""
    if not shared.done.is_set():
        shared.run()
    if shared.error is not None:
        raise shared.error
    assert shared.result is not None
    return shared.result[place]


def _serve(queue: "SimpleQueue[_Job[Any] | None]", device: torch.device, ready: threading.Event) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is None:
        torch.get_num_threads()  # once: a thread first takes the process's number, at some later point if not now
        torch.set_num_threads(1)
    ready.set()
    while (job := queue.get()) is not None:
        if not job.dropped:
            job.run(stream)
        del job  # while waiting for the next, hold no tensors


def _stop(queue: "SimpleQueue[_Job[Any] | None]", thread: threading.Thread) -> None:
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


def count(results: Mapping[str, Refreshed], counts: Counter[str]) -> None:
    """Add up what became of decompositions, and warn of those that failed."""
    for key, result in results.items():
        counts["refreshes"] += result.basis is not None
        counts[f"refreshes_{result.how}"] += 1
        counts["refresh_retries"] += result.retries
        counts["refresh_failures"] += result.basis is None
        if result.basis is None:
            logger.warning(f"ds_kfac: no decomposition of factor {key} succeeded; what it was last decomposed to stays")
