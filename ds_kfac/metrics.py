"""Metrics of a run: counters, the clip factor, and seconds per stage."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

STAGES = ("capture", "reduce", "refresh", "relayout", "precondition")
"""Stages of a K-FAC step. The stage "capture" runs in the model's forward and backward passes; all
other stages run before the optimizer's step."""
TIMER = "kfac_"
"""Prefix of the stages' names in DeepSpeed's wall_clock_breakdown."""

SUMMARY = {
    # the layer was not changed, because its gradient or its result was not finite
    "not_finite_layers": True,
    # the layer has no eigenbases or inverses yet, and is updated without them
    "unpreconditioned_layers": False,
    "refresh_failures": True,  # a decomposition failed
    # KFACAdamW did not change the layer, because its gradient was exactly zero
    "unused_layers": False,
    # KFACAdamW did not change the layer, because its gradient was too large for the moments
    "left_out_gradients": True,
    # a batch of a factor, or of EKFAC's eigenvalues, was scaled down, because its trace was far
    # above that of the average
    "limited_factors": True,
    # a factor's batch had no row, or had a value that is not finite: the factor was not changed
    "empty_updates": True,
    "missed_updates": True,  # a factor's batch had no row, and not all ranks contributed
}
"""Names of the counters that are kept on the device and summed over all layers. The value is True
if a counter counts all steps so far, and False if it counts only the last step."""


class Metrics:
    """Counters and timings.

    Args:
        timers: the engine's DeepSpeed timers if ``wall_clock_breakdown`` is on, else None. The
            timers then also measure K-FAC's stages, without synchronising the device.

    Attributes:
        counts: this rank's counters: "steps"; "skipped_steps"; "factor_updates" (steps that
            collected statistics); "captured_elements" (factor elements that these steps updated,
            summed over all ranks); "refreshes" (factors decomposed on this rank); "refreshes_<how>"
            ("refreshes" by method: eigh, iteration, cholesky, diagonal or failed);
            "refresh_retries" (failed attempts at a decomposition).
        current: the stage that began last.
        timings: set this to True to measure ``seconds``. It synchronises the device before and
            after every stage.
        seconds: dict from stage name to the seconds spent in the stage so far.
        nu: kl-clip factor of the last step, a device scalar, equal on all ranks; None while kl-clip
            is off.
        kl: nu^2 lr^2 <V, gradient> / 2, where V is the preconditioned gradient; a device scalar
            like ``nu``. With the damped curvature, this estimates how far a step without momentum
            moves the model's distribution. It is at most kl_clip / 2. With ``fisher`` monte_carlo
            its unit is nats per row of the loss.
        summary: fp32 tensor on the device with values summed over ranks, in the order of
            :data:`SUMMARY`.
    """

    def __init__(self, device: torch.device, timers: Any = None) -> None:
        self.timings = False
        self.timers = timers
        self.current = ""
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.nu: Tensor | None = None
        self.kl: Tensor | None = None
        self.summary = torch.zeros(len(SUMMARY), device=device, dtype=torch.float32)
        so_far = [float(each) for each in SUMMARY.values()]
        self._accumulates = torch.tensor(so_far, dtype=torch.float32, device=device)

    def step(self, summary: Tensor) -> None:
        """Count an applied step. ``summary``: the step's fp32 counts, ordered like
        :data:`SUMMARY`."""
        self.summary = self.summary * self._accumulates + summary
        self.counts["steps"] += 1

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Mark the ``with`` block as a named range in torch.profiler's trace, and time it if
        ``timings`` is on. ``name`` is one of :data:`STAGES`."""
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
        """Return all metrics by name. Synchronises with the device, so call it rarely."""
        values: dict[str, float] = {name: float(count) for name, count in self.counts.items()}
        values |= dict(zip(SUMMARY, self.summary.tolist(), strict=True))
        if self.nu is not None and self.kl is not None:
            values |= {"nu": float(self.nu), "kl": float(self.kl)}
        return values | {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
