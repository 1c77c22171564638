"""Which factors are due, when their intervals adapt to what their decomposers find: the timetable, kept up to date."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.host_copy import HostCopy


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
