"""BatchRamp: a batch that grows during training, in place of a rate that decays.

Where a gradient is mostly noise, twice the batch at sqrt 2 times the rate makes the same progress for the same samples
in half of the steps; late in training it mostly is. So the schedule counts samples, not steps, and the rate is the
schedule's times sqrt(batch / first batch).

Sources: McCandlish et al. 2018 (arXiv:1812.06162) for the noise scale; Malladi et al. 2022 (arXiv:2205.10287) for the
square root; Meterez et al. 2025 (arXiv:2510.14717) for a batch in place of a decay.
"""

import math
from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_kfac.engine.attachment import HANDLE
from ds_kfac.model.noise import NoiseScale, ratio

MARGIN = 8.0
FIRST = 5
"""Measurements before the first doubling."""


class BatchRamp:
    """Doubles the batch by more micro-batches a step, and stands in the place of the engine's learning-rate scheduler,
    which it steps once for every batch of the first size: its ``total_num_steps`` stay those of a constant batch.

        engine, _, _, _ = ds_kfac.initialize(...)
        ds_kfac.BatchRamp(engine, largest=512)
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()

    DeepSpeed's checkpoints hold its state as the scheduler's.

    Args:
        engine: made by DeepSpeed, at the boundary of a step.
        largest: samples of a step, over all ranks, that it does not go beyond.
        margin: the batch doubles when the noise scale that K-FAC measures is so many batches.
        at: instead, samples so far after which it doubles, ascending; this needs no K-FAC.

    Attributes:
        batch: samples of a step now.
        samples: of all steps so far.

    Raises:
        ValueError: ``largest`` is below twice the batch, ``at`` does not ascend; or without it, K-FAC is not attached,
            or cannot measure noise under this parallelism.
    """

    def __init__(self, engine: Any, *, largest: int, margin: float = MARGIN, at: Sequence[int] | None = None) -> None:
        self.engine, self.largest, self.margin, self.at = engine, largest, margin, None if at is None else tuple(at)
        self.first = self.batch = engine.train_batch_size()
        self.samples = engine.global_samples
        if largest < 2 * self.first:
            raise ValueError(f"ds_kfac: BatchRamp: largest is {largest}, but the batch is {self.first} and doubles")
        if self.at is not None and list(self.at) != sorted(set(self.at)):
            raise ValueError(f"ds_kfac: BatchRamp: at has to ascend, got {list(self.at)}")
        if self.at is None and not hasattr(engine, HANDLE):
            raise ValueError("ds_kfac: BatchRamp: no K-FAC measures this engine's noise: attach it, or give at")
        self.noise: NoiseScale | None = None if self.at is not None else getattr(engine, HANDLE).measure_noise()
        self.inner = engine.lr_scheduler
        self.rates = self._rates()
        engine.lr_scheduler = self

    def __getattr__(self, name: str) -> Any:
        """Of the schedule, such as its largest rates."""
        if name.startswith("__") or vars(self).get("inner") is None:
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    @property
    def gain(self) -> float:
        """What the schedule's rate is multiplied by."""
        return math.sqrt(self.batch / self.first)

    def step(self, *args: Any, **named: Any) -> None:
        """DeepSpeed calls it after a step that was applied, with whatever its caller gave."""
        self._set_rates(1.0)  # a schedule may go on from the rate as it was
        for _ in range(self.batch // self.first):
            if self.inner is not None:
                self.inner.step(*args, **named)
        self.rates = self._rates()
        self.samples += self.batch
        if 2 * self.batch <= self.largest and self._is_due() and self._is_boundary(2 * self.batch):
            self.engine.global_samples -= self.batch  # it will add the new batch for the step that ends
            self._set_batch(2 * self.batch)
        self._set_rates(self.gain)

    def _is_due(self) -> bool:
        if self.noise is not None:
            told = self.noise.told if self.noise.measurements >= FIRST else None
            return told is not None and ratio(*told) >= self.margin * self.batch
        doublings, at = round(math.log2(self.batch / self.first)), self.at or ()
        return doublings < len(at) and self.samples >= at[doublings]

    def _is_boundary(self, batch: int) -> bool:
        """Whether DeepSpeed, which counts micro-batches from the start on, would end the next step after all of its."""
        if isinstance(self.engine, PipelineEngine):
            return True
        steps = batch // (self.engine.train_micro_batch_size_per_gpu() * self.engine.dp_world_size)
        return (self.engine.micro_steps + 1) % steps == 0

    def _set_batch(self, batch: int) -> None:
        self.engine.set_train_batch_size(batch)
        self.batch = batch
        if hasattr(self.engine.optimizer, "gradient_accumulation_steps"):  # with offload it decides what is a norm
            self.engine.optimizer.gradient_accumulation_steps = self.engine.gradient_accumulation_steps()

    def _rates(self) -> list[Any]:
        rates = (group["lr"] for group in self._groups)
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _set_rates(self, gain: float) -> None:
        for group, rate in zip(self._groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):  # whose memory a recorded graph may know
                group["lr"].copy_(rate * gain)
            else:
                group["lr"] = rate * gain

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        inner = None if self.inner is None else self.inner.state_dict()
        own = {"batch": self.batch, "samples": self.samples, "rates": self.rates}
        noise = None if self.noise is None else self.noise.state_dict()
        return {"batch_ramp": {**own, "noise": noise}, "schedule": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also of a checkpoint without a ramp: it begins there."""
        own = state.get("batch_ramp")
        schedule = state["schedule"] if own else state
        if self.inner is not None and schedule is not None:
            self.inner.load_state_dict(schedule)
        if own:
            self.samples, self.rates = own["samples"], list(own["rates"])
            self._set_batch(own["batch"])
            if self.noise is not None and own["noise"]:
                self.noise.load_state_dict(own["noise"])
            self._set_rates(self.gain)
