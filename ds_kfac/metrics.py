"""Metrics of a run: counters, the clip factor, seconds per stage."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

STAGES = ("capture", "reduce", "refresh", "relayout", "precondition")
"""Of a K-FAC step. "capture" runs inside the model's forward and backward, the others before the optimizer's step."""
TIMER = "kfac_"
"""Before a stage's name in DeepSpeed's wall_clock_breakdown."""

SUMMARY = {
    "not_finite_layers": True,
    "unpreconditioned_layers": False,
    "refresh_failures": True,
    "unused_layers": False,
    "left_out_gradients": True,
    "limited_factors": True,
    "empty_updates": True,
    "missed_updates": True,
}
"""Counted on the device, over all layers; whether so far (True) or in the last step. Layers whose result was not finite
and was replaced by the gradient; that passed through because they have no eigenbases; refreshes that failed. With
KFACAdamW, layers that took no step because their gradient was exactly zero, or because it was too large for moments.
Batches of factors that were scaled down because their trace was far above the average's. Batches that left their
factor as it was: without a row on the ranks that contributed, or with a value that is not finite. Batches without a row
to which not all ranks contributed."""


class Metrics:
    """Counters; those of a skipped step are dropped with it.

    Args:
        timers: DeepSpeed's timers of the engine, if it prints a breakdown; stages are entered there too, without
            synchronising.

    Attributes:
        counts: of this rank: "steps", "skipped_steps", "factor_updates" (steps that captured), "captured_elements" (of
            factors, over all ranks), "refreshes" (factors decomposed here), "refreshes_<how>" (eigh;
            iteration, from the last eigenbasis; cholesky, an inverse; diagonal; failed),
            "refresh_retries" (failed attempts at a decomposition), "refresh_failures" (old bases, inverses kept),
            "parted_inputs" (groups of layers with one A that got different inputs here in a captured step, whose rows
            it then lacks).
        current: the last stage that began.
        timings: set it to fill ``seconds``, which synchronises the device around every stage.
        seconds: stage -> seconds so far.
        nu: last kl-clip factor, a device scalar, the same on all ranks; None while kl-clip is off.
        kl: likewise, nu^2 lr^2 <V, gradient> / 2: how far a step at the rate that kl-clip takes moves the model's
            distribution, in nats per row of the loss, before momentum and by the damped curvature (so at most kl_clip
            / 2). In nats with ``fisher`` monte_carlo only.
        summary: fp32 on the device, over all ranks, as :data:`SUMMARY` names it.
    """

    def __init__(self, device: torch.device, timers: Any = None) -> None:
        self.timings, self.timers, self.current = False, timers, ""
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.nu: Tensor | None = None
        self.kl: Tensor | None = None
        self.summary = torch.zeros(len(SUMMARY), device=device)
        self._accumulates = torch.tensor([float(so_far) for so_far in SUMMARY.values()], device=device)
        self.step_counts: Counter[str] = Counter()
        self.step_summary = torch.zeros_like(self.summary)

    def end(self, *, applied: bool) -> None:
        if applied:
            self.counts += self.step_counts
            self.summary = self.summary * self._accumulates + self.step_summary
        self.counts["steps" if applied else "skipped_steps"] += 1
        self.step_counts, self.step_summary = Counter(), torch.zeros_like(self.summary)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named range in torch.profiler's trace, timed if timings are on; ``name`` is one of :data:`STAGES`."""
        self.current = name
        with torch.profiler.record_function(f"ds_kfac::{name}"):
            if not self.timings and self.timers is None:
                yield
                return
            timer = None if self.timers is None else self.timers(TIMER + name)
            if self.timings:
                get_accelerator().synchronize()
            start = time.perf_counter()
            if timer is not None:
                timer.start()
            try:
                yield
            finally:
                if timer is not None:
                    timer.stop()
                if self.timings:
                    get_accelerator().synchronize()
                    self.seconds[name] += time.perf_counter() - start

    def values(self) -> dict[str, float]:
        """All of it by name. Reads device scalars, so call it now and then only."""
        values: dict[str, float] = {name: float(count) for name, count in self.counts.items()}
        values |= dict(zip(SUMMARY, self.summary.tolist(), strict=True))
        if self.nu is not None and self.kl is not None:
            values |= {"nu": float(self.nu), "kl": float(self.kl)}
        return values | {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
