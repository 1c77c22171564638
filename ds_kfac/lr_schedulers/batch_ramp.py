"""BatchRamp: increase the batch during training, instead of decreasing the learning rate.

Late in training a gradient is mostly noise. Then a run with twice the batch and sqrt 2 times the
learning rate makes the same progress with the same samples, in half of the steps. So a ramp lets
the learning-rate schedule count samples instead of steps, and multiplies the schedule's learning
rate by sqrt(batch / first batch).

Sources: McCandlish et al. 2018 (arXiv:1812.06162) for noise and batches; Malladi et al. 2022
(arXiv:2205.10287) for the square root; Meterez et al. 2025 (arXiv:2510.14717) for a batch in place
of a decay.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_kfac.zero.deepspeed_versions import caller_sets_boundaries

STATE = "batch_ramp"
"""Key of the ramp's state in the scheduler's state."""


class BatchRamp:
    """Double the batch after given numbers of samples. A step then has twice as many micro-batches.

    A ramp replaces the engine's learning-rate scheduler. It calls ``step`` of the replaced
    scheduler as often as if the batch had not grown, so ``total_num_steps`` is the same as with a
    constant batch.

        engine, _, _, _ = ds_kfac.initialize(...)
        ds_kfac.BatchRamp(engine, largest=512, at=[1_000_000, 2_000_000])
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()

    DeepSpeed's checkpoints hold the ramp's state beside the scheduler's. If you set a learning rate
    between two steps, it stays in effect. Later doublings of the batch multiply it by sqrt 2.

    Args:
        engine: a DeepSpeed engine that counts its micro-batches itself and is between two steps.
        largest: largest number of samples in a step, summed over all ranks.
        at: ascending numbers of samples, counted from the start of the run. The batch doubles after
            each of them.

    Attributes:
        inner: the engine's own learning-rate scheduler; None if it has none.
        first: number of samples in the first step.
        batch: current number of samples in a step.
        rates: learning rate of each parameter group, as it would be with the first batch.

    Raises:
        ValueError: ``largest`` is below twice the batch; ``at`` is empty, does not ascend, or has
            more doublings than ``largest`` allows; or the engine already has a ramp, is in the
            middle of a step, or does not count its micro-batches.
    """

    def __init__(self, engine: Any, *, largest: int, at: Sequence[int] = ()) -> None:
        self.engine = engine
        self.largest = largest
        self.at = tuple(at)
        self.inner = engine.lr_scheduler
        self.first = engine.train_batch_size()
        self.batch = self.first
        problem = self._refusal()
        if problem:
            raise ValueError(f"ds_kfac: BatchRamp: {problem}")
        self.rates = self._rates()
        engine.lr_scheduler = self

    def _refusal(self) -> str | None:
        """Return why this engine cannot have this ramp; None if it can."""
        engine = self.engine
        at = self.at
        most_doublings = max(0, int(math.log2(self.largest / self.first)))
        if not most_doublings:
            return (
                f"largest is {self.largest}, but the batch is {self.first} and has to double at "
                "least once"
            )
        if not at:
            return (
                "at must list the numbers of samples after which the batch doubles, for example "
                "at=[2_000, 4_000]. Ramps by the noise scale were removed in 0.2, because ramps at "
                "given numbers of samples were better (docs/notes/batches.md)"
            )
        if list(at) != sorted(set(at)) or len(at) > most_doublings:
            return (
                f"at must list 1 to {most_doublings} numbers of samples in ascending order, "
                f"because each doubles the batch and largest is {self.largest}; got {list(at)}"
            )
        if isinstance(self.inner, BatchRamp):
            return "this engine has a ramp already"
        if caller_sets_boundaries(engine):
            return (
                "the caller decides where a step ends, as Accelerate does, so BatchRamp cannot "
                "change the batch size"
            )
        is_within_step = engine.micro_steps % engine.gradient_accumulation_steps() != 0
        if is_within_step and not isinstance(engine, PipelineEngine):
            return "the engine is in the middle of a step; make the ramp after engine.step()"
        return None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine's own scheduler, such as its largest learning rates."""
        if name.startswith("__") or vars(self).get("inner") is None:
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    @property
    def gain(self) -> float:
        """Factor by which the scheduler's learning rate is multiplied."""
        return math.sqrt(self.batch / self.first)

    def step(self, *args: Any, **named: Any) -> None:
        """Call ``step`` of the engine's own scheduler, and double the batch if that is due.
        DeepSpeed calls this method after each optimizer step that it did not skip.

        Args:
            args: positional arguments for the engine's own scheduler, such as a number of samples
                or a metric. Without any arguments, positional or named, ``step`` of that scheduler
                is called batch / first times, otherwise once.
            named: named arguments for the engine's own scheduler.
        """
        if caller_sets_boundaries(self.engine):
            raise RuntimeError(
                "ds_kfac: BatchRamp: the caller decides where a step ends "
                "(set_gradient_accumulation_boundary), so the batch would not grow, but DeepSpeed "
                "would divide the loss as if it did; train without a ramp"
            )
        self._take_over()
        # some schedulers compute the next learning rate from the current one, so remove our factor
        self._set_rates(1.0)
        if self.inner is not None:
            count = 1 if args or named else self.batch // self.first
            for _ in range(count):
                self.inner.step(*args, **named)
        self.rates = self._rates()
        doubled = 2 * self.batch
        if doubled <= self.largest and self._is_due() and self._is_boundary(doubled):
            # After this step, DeepSpeed will add the new batch to global_samples, although the step
            # had half as many samples. It will also divide the logged loss by twice the step's
            # number of micro-batches. The next lines compensate for both.
            self.engine.global_samples -= self.batch
            if isinstance(getattr(self.engine, "total_loss", None), Tensor):
                self.engine.total_loss *= 2
            self._set_batch(doubled)
        self._set_rates(self.gain)

    def _is_due(self) -> bool:
        """Return whether enough samples were seen for the next doubling."""
        doublings = round(math.log2(self.batch / self.first))
        samples = self.engine.global_samples + self.batch  # including the step that ends now
        return doublings < len(self.at) and samples >= self.at[doublings]

    def _is_boundary(self, batch: int) -> bool:
        """Return whether the number of micro-batches since the start of the run is a multiple of
        the number of micro-batches in ``batch``.

        If it is not, DeepSpeed would end the next step too early, because it counts micro-batches
        from the start of the run.
        """
        if isinstance(self.engine, PipelineEngine):
            return True
        micro_batches = batch // self._micro_batch
        return (self.engine.micro_steps + 1) % micro_batches == 0

    @property
    def _micro_batch(self) -> int:
        """Number of samples in a micro-batch, summed over all ranks."""
        return self.engine.train_micro_batch_size_per_gpu() * self.engine.dp_world_size

    def _set_batch(self, batch: int) -> None:
        self.engine.set_train_batch_size(batch)
        self.batch = batch
        # With offload ZeRO has its own copy of the number of micro-batches. It uses this copy to
        # recognize the last micro-batch of a step, after which it computes norms.
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "gradient_accumulation_steps"):
            optimizer.gradient_accumulation_steps = self.engine.gradient_accumulation_steps()

    def _rates(self) -> list[Any]:
        rates = (group["lr"] for group in self._groups)
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _take_over(self) -> None:
        """Adopt learning rates that the user has set since the last step."""
        for index, (group, rate) in enumerate(zip(self._groups, self.rates, strict=False)):
            new = group["lr"]
            ours = rate * self.gain
            if isinstance(new, Tensor):  # compared on its device, without waiting for it
                self.rates[index] = torch.where(new == ours, rate, new / self.gain)
            elif new != ours:
                self.rates[index] = new / self.gain

    def _set_rates(self, gain: float) -> None:
        """Write the learning rates times ``gain`` into the parameter groups. A group that was added
        since the last step keeps its own learning rate."""
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
        """Return the scheduler's state with the ramp's state beside it, so that an engine without a
        ramp can load it, too."""
        self._take_over()
        ramp = {
            "first": self.first,
            "batch": self.batch,
            "rates": self.rates,
            "micro": self.engine.micro_steps,
        }
        schedule = {} if self.inner is None else self.inner.state_dict()
        return {**schedule, STATE: ramp}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from :meth:`state_dict`. If the checkpoint was saved without a ramp, the ramp
        begins now.

        Raises:
            ValueError: the saved batch is not a multiple of the micro-batch size summed over all
                ranks. Nothing changes then.
        """
        schedule = dict(state or {})
        ramp = schedule.pop(STATE, None)
        if ramp and ramp["batch"] % self._micro_batch:
            raise ValueError(
                f"ds_kfac: BatchRamp: the checkpoint's batch is {ramp['batch']} samples, which is "
                f"not a multiple of {self._micro_batch}, the micro-batch size summed over all "
                "ranks. Load the checkpoint with a different number of ranks or another "
                "train_micro_batch_size_per_gpu"
            )
        if self.inner is not None and schedule:
            self.inner.load_state_dict(schedule)
        if not ramp:
            self.rates = []  # read at the next step: the optimizer's rates may be loaded after this
            return
        self.first = ramp["first"]
        self.rates = list(ramp["rates"])
        self._set_batch(ramp["batch"])
        # the next micro-batch is the first of a step
        if not isinstance(self.engine, PipelineEngine):
            surplus = ramp["micro"] % self.engine.gradient_accumulation_steps()
            self.engine.micro_steps = ramp["micro"] - surplus
        self._set_rates(self.gain)
