"""When: numbers that change over steps, and which work is due at a step. Pure functions of the step."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

Numbers = tuple[float, ...]
Steps = tuple[int, ...]


def constant(values: Numbers, steps: Steps, step: int) -> float:
    """The one value."""
    return values[0]


def linear(values: Numbers, steps: Steps, step: int) -> float:
    """On a straight line from the first value to the second."""
    return _between(values, _part_done(steps, step))


def cosine(values: Numbers, steps: Steps, step: int) -> float:
    """On half a cosine: flat at both ends."""
    return _between(values, (1 - math.cos(math.pi * _part_done(steps, step))) / 2)


def exponential(values: Numbers, steps: Steps, step: int) -> float:
    """By the same factor every step; both values positive."""
    part = _part_done(steps, step)
    return values[0] ** (1 - part) * values[1] ** part


def piecewise(values: Numbers, steps: Steps, step: int) -> float:
    """The first value before the first step, the next one from that step on, and so on."""
    return values[bisect_right(steps, step)]


def _between(values: Numbers, part: float) -> float:
    return (1 - part) * values[0] + part * values[1]  # unlike start + part * difference, exact at both ends


def _part_done(steps: Steps, step: int) -> float:
    first, last = steps
    return min(max((step - first) / (last - first), 0.0), 1.0)


SCHEDULES: dict[str, Callable[[Numbers, Steps, int], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
    "piecewise": piecewise,
}


@dataclass(frozen=True)
class Value:
    """A number over steps. Not checked here: config does, and names the key.

    Attributes:
        kind: a name in ``SCHEDULES``.
        values: the numbers it passes through.
        steps: increasing; where a ramp begins and ends, or where the pieces after the first begin.
    """

    kind: str
    values: Numbers
    steps: Steps = ()

    @classmethod
    def constant(cls, value: float) -> "Value":
        return cls("constant", (float(value),))

    @classmethod
    def ramp(cls, kind: str, start: float, end: float, steps: int, delay: int = 0) -> "Value":
        """``start`` for ``delay`` steps, then to ``end`` over ``steps`` steps (at least 1), ``end`` from there on."""
        return cls(kind, (float(start), float(end)), (delay, delay + steps))

    @classmethod
    def piecewise(cls, values: list[float], steps: list[int]) -> "Value":
        """``values[i]`` from step ``steps[i - 1]`` on; one value more than steps."""
        return cls("piecewise", tuple(map(float, values)), tuple(steps))

    def at(self, step: int) -> float:
        """The number at ``step``, the count of applied steps before it."""
        return SCHEDULES[self.kind](self.values, self.steps, step)

    def interval_at(self, step: int) -> int:
        """The number as an interval in steps: the nearest integer (a half goes up), at least 1."""
        return max(1, math.floor(self.at(step) + 0.5))

    def times(self, factor: float) -> "Value":
        return Value(self.kind, tuple(factor * value for value in self.values), self.steps)

    @property
    def settled(self) -> int:
        """The step from which on it no longer changes."""
        return self.steps[-1] if self.steps else 0

    def __str__(self) -> str:
        numbers = [f"{value:.12g}" for value in self.values]
        if self.kind == "constant":
            return numbers[0]
        if self.kind == "piecewise":
            later = [f"{number} from step {step}" for number, step in zip(numbers[1:], self.steps, strict=True)]
            return ", ".join([numbers[0], *later])
        delay, end = self.steps
        after = f" after {delay}" if delay else ""
        return f"{self.kind} {numbers[0]} -> {numbers[1]} over {end - delay} steps{after}"


@dataclass(frozen=True)
class BurnIn:
    """Other, constant intervals for the first ``steps`` steps (at least 1), where curvature changes fastest."""

    steps: int
    update_interval: int
    refresh_interval: int

    def __str__(self) -> str:
        return f"{self.steps} steps with intervals {self.update_interval} and {self.refresh_interval}"


@dataclass(frozen=True)
class Due:
    """What a step has to do beside preconditioning."""

    capture: bool
    """Fold this step's batch into the factors."""
    refresh: bool
    """Decompose the factors again."""


NOTHING = Due(capture=False, refresh=False)


@dataclass
class _Walked:
    """The steps decided so far, in order; what was decided last."""

    due: list[Due] = field(default_factory=lambda: [Due(capture=True, refresh=True)])
    last_capture: int = 0
    last_refresh: int = 0


@dataclass(frozen=True)
class Schedule:
    """Decoupled intervals (Pauloski et al. 2020), in steps: factors every ``update``, bases less often.

    Step 0 captures and refreshes. A later step captures once ``update`` steps have passed since the last capture, and
    a capture refreshes once ``refresh`` steps have passed since the last refresh: bases never come from old factors,
    so a ``refresh`` that is no multiple of ``update`` waits for the next capture. An interval is read at the step that
    is asked about, not at the last capture, so a shorter one takes effect at once.

    During the burn-in its intervals hold where shorter; ``update`` and ``refresh`` keep their clock. The step after it,
    ``burn_in.steps``, captures and refreshes whatever the intervals say: the longer interval starts with fresh bases.
    """

    update: Value
    refresh: Value
    burn_in: BurnIn | None = None
    _walked: _Walked = field(default_factory=_Walked, init=False, repr=False, compare=False)

    def intervals(self, step: int) -> tuple[int, int]:
        """Steps between captures and between refreshes that hold at ``step``."""
        return self._update_interval(step), self._refresh_interval(step)

    def _update_interval(self, step: int) -> int:
        interval, burn_in = self.update.interval_at(step), self.burn_in
        return min(interval, burn_in.update_interval) if burn_in and step < burn_in.steps else interval

    def _refresh_interval(self, step: int) -> int:
        interval, burn_in = self.refresh.interval_at(step), self.burn_in
        return min(interval, burn_in.refresh_interval) if burn_in and step < burn_in.steps else interval

    @property
    def settled(self) -> int:
        """The step from which on both intervals no longer change."""
        return max(self.update.settled, self.refresh.settled, self.burn_in.steps if self.burn_in else 0)

    @property
    def final_refresh_interval(self) -> int:
        """Steps between refreshes once settled: what a long run pays for."""
        return self.intervals(self.settled)[1]

    def due(self, step: int) -> Due:
        """Work due at ``step`` >= 0, the number of applied steps before it, in whatever order steps are asked about.

        Up to ``settled`` it depends on the steps before, which are decided once and kept; after it, it is periodic.
        """
        settled = self.settled
        while len(self._walked.due) <= min(step, settled):
            self._decide_next()
        return self._walked.due[step] if step <= settled else self._periodic(step)

    def _decide_next(self) -> None:
        walked = self._walked
        step = len(walked.due)
        burnt_in = self.burn_in is not None and step == self.burn_in.steps
        if not burnt_in and step < walked.last_capture + self._update_interval(step):
            walked.due.append(NOTHING)
            return
        refreshes = burnt_in or step >= walked.last_refresh + self._refresh_interval(step)
        walked.due.append(Due(capture=True, refresh=refreshes))
        walked.last_capture = step
        if refreshes:
            walked.last_refresh = step

    def _periodic(self, step: int) -> Due:
        """After ``settled``: captures every ``update``, refreshes every so many captures."""
        update, refresh = self.intervals(step)
        first, last_refresh = self._walked.last_capture, self._walked.last_refresh
        next_refresh = first + update * max(1, _ceiling(last_refresh + refresh - first, update))
        period = update * _ceiling(refresh, update)
        refreshes = step >= next_refresh and (step - next_refresh) % period == 0
        return Due((step - first) % update == 0, refreshes)


def _ceiling(a: int, b: int) -> int:
    return -(-a // b)
