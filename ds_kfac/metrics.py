"""What a run wants to know about K-FAC: counters, the clip factor, seconds per stage."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class Metrics:
    """Counters; those of a skipped step are dropped with it.

    Attributes:
        counts: of this rank: "steps", "skipped_steps", "factor_updates", "refreshes" (layers decomposed),
            "refresh_retries" (rungs of the failure ladder that failed), "refresh_failures" (old bases kept).
        seconds: stage -> seconds so far; filled if timings are on.
        nu: last kl-clip factor, a device scalar, the same on all ranks; None while kl-clip is off.
        summary: fp32 [3] on the device, over all ranks: layers so far whose result was not finite and was replaced by
            the gradient; layers that passed through in the last step because they have no eigenbases; failed refreshes
            so far.
    """

    def __init__(self, *, timings: bool, device: torch.device) -> None:
        self.timings = timings
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.nu: Tensor | None = None
        self.summary = torch.zeros(3, device=device)
        self._accumulates = torch.tensor([1.0, 0.0, 1.0], device=device)
        self.begin()

    def begin(self) -> None:
        """Start a step's own counts."""
        self.step_counts: Counter[str] = Counter()
        self.step_summary = torch.zeros_like(self.summary)

    def end(self, *, applied: bool) -> None:
        """Keep the step's counts if it was applied."""
        if applied:
            self.counts += self.step_counts
            self.summary = self.summary * self._accumulates + self.step_summary
        self.counts["steps" if applied else "skipped_steps"] += 1
        self.begin()

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
        names = ("not_finite_layers", "unpreconditioned_layers", "refresh_failures")
        values |= dict(zip(names, self.summary.tolist(), strict=True))
        if self.nu is not None:
            values["nu"] = float(self.nu)
        values |= {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
        return [(f"Train/KFAC/{name}", value, samples) for name, value in values.items()]
