"""BatchRamp: a batch that grows during training, in place of a rate that decays.

Late in training a gradient is mostly noise. Then twice the batch at sqrt 2 times the rate makes the
same progress with the same samples, in half of the steps. So the schedule counts samples, not
steps, and the rate is the schedule's times sqrt(batch / first batch).

Sources: McCandlish et al. 2018 (arXiv:1812.06162) for noise and batches; Malladi et al. 2022
    (arXiv:2205.10287) for the
square root; Meterez et al. 2025 (arXiv:2510.14717) for a batch in place of a decay.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_kfac.zero.deepspeed_versions import caller_sets_boundaries

STATE = "batch_ramp"


class BatchRamp:
    """Doubles the batch by taking more micro-batches a step. It takes the place of the engine's
    learning-rate scheduler, and steps that once for every batch of the first size:
    ``total_num_steps`` is the same as with a constant batch.

        engine, _, _, _ = ds_kfac.initialize(...)
        ds_kfac.BatchRamp(engine, largest=512, at=[1_000_000, 2_000_000])
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()

    DeepSpeed's checkpoints hold its state beside the scheduler's. A rate that is set by hand
    between two steps holds from then on for the present batch, and grows with it.

    Args:
        engine: a DeepSpeed engine between two steps, which counts its micro-batches itself.
        largest: most samples of a step, over all ranks.
        at: numbers of samples since the start of the run after which the batch doubles, ascending.

    Attributes:
        first, batch: samples of the first step, and of a step now.

    Raises:
        ValueError: ``largest`` is below twice the batch, ``at`` does not ascend or has more
            doublings than ``largest`` allows, the engine has a ramp, is in the middle of a step or
            does not count micro-batches.
    """

    def __init__(self, engine: Any, *, largest: int, at: Sequence[int] = ()) -> None:
        self.engine, self.largest, self.at = engine, largest, tuple(at)
        self.inner = engine.lr_scheduler
        self.first = self.batch = engine.train_batch_size()
        if wrong := self._refusal():
            raise ValueError(f"ds_kfac: BatchRamp: {wrong}")
        self.rates = self._rates()
        engine.lr_scheduler = self

    def _refusal(self) -> str | None:
        engine, at = self.engine, self.at
        possible = max(0, int(math.log2(self.largest / self.first)))
        if not possible:
            return f"largest is {self.largest}, but the batch is {self.first} and doubles"
        if not at:
            return (
                "give at, the numbers of samples after which the batch doubles, as at=[2_000, "
                "4_000]; ramps by the "
                "noise scale were removed in 0.2 because they lost to these (docs/notes/batches.md)"
            )
        if list(at) != sorted(set(at)) or len(at) > possible:
            return (
                f"at has to be 1 to {possible} ascending numbers of samples ({self.largest} at "
                f"most), got {list(at)}"
            )
        if isinstance(self.inner, BatchRamp):
            return "this engine has a ramp"
        if caller_sets_boundaries(engine):
            return (
                "the caller decides where a step ends, as Accelerate does, so BatchRamp cannot "
                "change the batch size"
            )
        if engine.micro_steps % engine.gradient_accumulation_steps() and not isinstance(
            engine, PipelineEngine
        ):
            return "the engine is in the middle of a step; call it after engine.step()"
        return None

    def __getattr__(self, name: str) -> Any:
        """The schedule's attributes, such as its largest rates."""
        if name.startswith("__") or vars(self).get("inner") is None:
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    @property
    def gain(self) -> float:
        """Factor on the schedule's rate."""
        return math.sqrt(self.batch / self.first)

    def step(self, *args: Any, **named: Any) -> None:
        """Called by DeepSpeed after an applied step. With arguments, such as a number of samples or
        a metric, the schedule is stepped once, with these."""
        if caller_sets_boundaries(self.engine):
            raise RuntimeError(
                "ds_kfac: BatchRamp: the caller decides where a step ends "
                "(set_gradient_accumulation_boundary), so the "
                "batch would not grow, but DeepSpeed would divide the loss as if it did; train "
                "without a ramp"
            )
        self._take_over()
        # some schedules compute the next rate from the current one, without our factor
        self._set_rates(1.0)
        if self.inner is not None:
            for _ in range(1 if args or named else self.batch // self.first):
                self.inner.step(*args, **named)
        self.rates = self._rates()
        if 2 * self.batch <= self.largest and self._is_due() and self._is_boundary(2 * self.batch):
            # for the step that ends DeepSpeed will add the new batch, twice the old one, to
            # global_samples, and divide the logged loss by twice as many micro-batches
            self.engine.global_samples -= self.batch
            if isinstance(getattr(self.engine, "total_loss", None), Tensor):
                self.engine.total_loss *= 2
            self._set_batch(2 * self.batch)
        self._set_rates(self.gain)

    def _is_due(self) -> bool:
        doublings = round(math.log2(self.batch / self.first))
        samples = self.engine.global_samples + self.batch  # with the step that ends
        return doublings < len(self.at) and samples >= self.at[doublings]

    def _is_boundary(self, batch: int) -> bool:
        """Whether a step of this batch would begin on a multiple of its micro-batches. DeepSpeed
        counts micro-batches from the start of the run, and would else end the next step too
        early."""
        if isinstance(self.engine, PipelineEngine):
            return True
        return (self.engine.micro_steps + 1) % (batch // self._micro_batch) == 0

    @property
    def _micro_batch(self) -> int:
        """Samples of a micro-batch, over all ranks."""
        return self.engine.train_micro_batch_size_per_gpu() * self.engine.dp_world_size

    def _set_batch(self, batch: int) -> None:
        self.engine.set_train_batch_size(batch)
        self.batch = batch
        # with offload ZeRO has a copy of the number, and takes norms at the last micro-batch by it
        if hasattr(self.engine.optimizer, "gradient_accumulation_steps"):
            self.engine.optimizer.gradient_accumulation_steps = (
                self.engine.gradient_accumulation_steps()
            )

    def _rates(self) -> list[Any]:
        rates = (group["lr"] for group in self._groups)
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _take_over(self) -> None:
        """Adopt rates that the user has set since the last step."""
        for index, (group, rate) in enumerate(zip(self._groups, self.rates, strict=False)):
            new, ours = group["lr"], rate * self.gain
            if isinstance(new, Tensor):  # compared on its device, without waiting for it
                self.rates[index] = torch.where(new == ours, rate, new / self.gain)
            elif new != ours:
                self.rates[index] = new / self.gain

    def _set_rates(self, gain: float) -> None:
        """Write the rates times ``gain`` into the groups; a group added since the last step keeps
        its own."""
        for group, rate in zip(self._groups, self.rates, strict=False):
            # in place: a captured CUDA graph may read this memory
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate * gain)
            else:
                group["lr"] = rate * gain

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state with ours beside it, so that it also loads without a ramp."""
        self._take_over()
        ramp = {
            "first": self.first,
            "batch": self.batch,
            "rates": self.rates,
            "micro": self.engine.micro_steps,
        }
        return {**(self.inner.state_dict() if self.inner is not None else {}), STATE: ramp}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from :meth:`state_dict`, or from the state of a checkpoint without a ramp: the
        ramp begins there.

        Raises:
            ValueError: this number of ranks cannot have the saved batch; nothing was changed.
        """
        schedule = dict(state or {})
        ramp = schedule.pop(STATE, None)
        if ramp and ramp["batch"] % self._micro_batch:
            raise ValueError(
                f"ds_kfac: BatchRamp: the checkpoint's batch is {ramp['batch']} samples, which "
                f"{self._micro_batch} (a "
                "micro-batch of all ranks) does not divide: load it with another number of ranks "
                "or train_micro_batch_size_per_gpu"
            )
        if self.inner is not None and schedule:
            self.inner.load_state_dict(schedule)
        if not ramp:
            self.rates = []  # read at the next step: the optimizer's rates may be loaded after this
            return
        self.first, self.rates = ramp["first"], list(ramp["rates"])
        self._set_batch(ramp["batch"])
        # the next micro-batch is the first of a step
        if not isinstance(self.engine, PipelineEngine):
            self.engine.micro_steps = (
                ramp["micro"] - ramp["micro"] % self.engine.gradient_accumulation_steps()
            )
        self._set_rates(self.gain)
