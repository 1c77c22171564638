"""What a run wants to know about K-FAC: counters, the clip factor, seconds per stage."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class Metrics:
    """Counters of one rank.

    Attributes:
        counts: "steps", "skipped_steps", "factor_updates", "refreshes" (factors decomposed), "refresh_retries" (rungs
            of the failure ladder that failed), "refresh_failures" (old basis kept).
        seconds: stage -> seconds so far; filled if timings are on.
        nu: last kl-clip factor, a device scalar, the same on all ranks; None while kl-clip is off.
        unpreconditioned: own layers that passed through in the last step because they have no eigenbasis.
        not_finite: own layers so far whose preconditioned gradient was not finite and was replaced; device scalar.
    """

    def __init__(self, *, timings: bool, device: torch.device) -> None:
        self.timings = timings
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.nu: Tensor | None = None
        self.unpreconditioned = 0
        self.not_finite = torch.zeros((), device=device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named range in torch.profiler's trace, timed if timings are on."""
        with torch.profiler.record_function(f"ds_kfac::{name}"):
            if not self.timings:
                yield
                return
            get_accelerator().synchronize()
            start = time.perf_counter()
            yield
            get_accelerator().synchronize()
            self.seconds[name] += time.perf_counter() - start

    def events(self, samples: int) -> list[tuple[str, float, int]]:
        """For DeepSpeed's monitor. Reads device scalars, so call it now and then only."""
        values: dict[str, float] = {name: float(count) for name, count in self.counts.items()}
        values["not_finite_layers"] = float(self.not_finite)
        values["unpreconditioned_layers"] = float(self.unpreconditioned)
        if self.nu is not None:
            values["nu"] = float(self.nu)
        values |= {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
        return [(f"Train/KFAC/{name}", value, samples) for name, value in values.items()]
