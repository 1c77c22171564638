"""What only the device knows and the host reads later, when it waits for nothing: how much factors change, for adaptive
intervals, and which gradients were left out."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import FactorsDue


class HostCopy:
    """Starts copying at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor

    @property
    def done(self) -> bool:
        """Whether reading waits for nothing."""
        return self._event is None or self._event.query()

    def tolist(self) -> list:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class FactorSchedule:
    """The timetable of a plan. The same on every rank.

    A decomposer reports in the step itself how similar a factor is to its last values. The host reads it when the next
    step that might capture asks, which is long after the copy was started: nobody waits.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.timetable = plan, plan.timetable()
        self._unread: tuple[int, FactorsDue, list[str], HostCopy] | None = None

    def due(self, step: int) -> FactorsDue:
        """Factors due at ``step``."""
        if self._unread is not None and self.timetable.captures_possible(step):
            self.settle()
        return self.timetable.due(step)

    def weight(self, key: str, decay: float) -> float:
        """Of the past in a factor's running average: ``decay`` for every ordinary interval that it sat out."""
        return decay ** self.timetable.multiplier(key)

    def record(self, step: int, due: FactorsDue, scalars: Mapping[Hashable, Tensor]) -> None:
        """After an applied step.

        Args:
            scalars: ("similar", factor) -> 1 if similar to its last value, plus 2 if to the one before; if adaptive.
        """
        keys = sorted(due.capture)
        if self.plan.adaptive is None or not keys:
            self.timetable.record(step, due, {})
        else:
            self._unread = (step, due, keys, HostCopy(torch.stack([scalars["similar", key] for key in keys])))

    def settle(self) -> None:
        """Wait for what is still to be read, so that the timetable is that of all applied steps."""
        if self._unread is None:
            return
        step, due, keys, copy = self._unread
        self._unread = None
        codes = dict(zip(keys, map(int, copy.tolist()), strict=True))
        self.timetable.record(step, due, {key: (bool(code & 1), bool(code & 2)) for key, code in codes.items()})

    def reset(self) -> None:
        """Start afresh."""
        self._unread = None
        self.timetable.reset()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        self.settle()
        return self.timetable.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`, maybe of a plan with other factors."""
        self._unread = None
        self.timetable.restore(state)


class Watch:
    """Warns of layers whose gradients were left out because moments could not have held them.

    Args:
        names: this rank's layers.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._seen = torch.zeros(len(self.names), device=device)
        self._said: set[str] = set()
        self._copy: HostCopy | None = None

    def step(self, flags: Mapping[str, Tensor], *, look: bool) -> None:
        """After a step that was applied.

        Args:
            flags: layer name -> bool scalar, of none or of all layers.
            look: say what an earlier look asked for, if it has arrived, and ask again. Now and then is enough.
        """
        if flags:
            self._seen = self._seen + torch.stack([flags[name] for name in self.names])
        if look and (self._copy is None or self._copy.done):
            self._say([] if self._copy is None else self._copy.tolist())
            self._copy = HostCopy(self._seen)

    def _say(self, counts: Sequence[float]) -> None:
        for name, count in zip(self.names, counts, strict=False):
            if count and name not in self._said:
                self._said.add(name)
                logger.warning(
                    f"ds_kfac: gradients of {name} were left out, {int(count)} so far: of norm 1e15 and more "
                    "they are none, and Adam's moments would not get over them. Its weights were not touched in these "
                    'steps; "gradient_clipping" in the DeepSpeed config bounds them'
                )
