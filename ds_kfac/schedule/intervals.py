"""When: numbers that change over steps, and which work is due at a step. Pure functions of the step."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

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
    """What a step has to do in addition to preconditioning."""

    capture: bool
    """Fold this step's batch into the factors."""
    refresh: bool
    """Decompose the factors again."""


NOTHING = Due(capture=False, refresh=False)


@dataclass
class _Walked:
    """The steps decided so far, in order, and which of them capture and refresh."""

    due: list[Due] = field(default_factory=lambda: [Due(capture=True, refresh=True)])
    captures: list[int] = field(default_factory=lambda: [0])
    refreshes: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class Schedule:
    """Decoupled intervals (Pauloski et al. 2020), in steps: factors every ``update``, bases less often.

    Step 0 captures and refreshes. A later step captures once ``update`` steps have passed since the last capture, and
    a capture refreshes once ``refresh`` steps have passed since the last refresh: bases never come from old factors,
    so a ``refresh`` that is no multiple of ``update`` waits for the next capture. An interval is read at the step that
    is asked about, not at the last capture, so a shorter one takes effect at once.

    During the burn-in its intervals hold where shorter; ``update`` and ``refresh`` keep their clock. The step after it,
    ``burn_in.steps``, captures and refreshes whatever the intervals say: the longer interval starts with fresh bases.

    With an ``offset`` above 0 the clock is displaced from the end of the burn-in, B, on (without burn-in B is 0):
    nothing is due until B + offset % update interval, which captures whatever the interval says, and nothing refreshes
    until B + offset, which captures and refreshes. Likewise in the burn-in from step 1 on, by the offset modulo its
    refresh interval. Step 0 is the same for all offsets.
    """

    update: Value
    refresh: Value
    burn_in: BurnIn | None = None
    offset: int = 0
    _walked: _Walked = field(default_factory=_Walked, init=False, repr=False, compare=False)

    def displaced(self, offset: int) -> "Schedule":
        """The same intervals with this ``offset`` >= 0, whatever it was before; see the class."""
        assert offset >= 0, f"a schedule cannot be displaced by {offset} steps"
        return replace(self, offset=offset)

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
    def _displaced_from(self) -> int:
        return self.burn_in.steps if self.burn_in else 0

    @cached_property
    def settled(self) -> int:
        """The step from which on both intervals no longer change, and from which on no offset is waited for."""
        return max(self.update.settled, self.refresh.settled, self._displaced_from + self.offset)

    def due(self, step: int) -> Due:
        """Work due at ``step`` >= 0, the number of applied steps before it, in whatever order steps are asked about.

        Up to ``settled`` it depends on the steps before, which are decided once and kept; after it, it is periodic.
        """
        if self._walk(step):
            return self._walked.due[step]
        update, next_refresh, period = self._rhythm
        refreshes = step >= next_refresh and (step - next_refresh) % period == 0
        return Due((step - self._walked.captures[-1]) % update == 0, refreshes)

    def captures(self, step: int) -> int:
        """How many of the steps 0 .. ``step`` capture; 0 for step -1."""
        captures = self._walked.captures
        if self._walk(step):
            return bisect_right(captures, step)
        return len(captures) + (step - captures[-1]) // self._rhythm[0]

    def last_refresh(self, step: int) -> int:
        """The last step up to ``step`` >= 0 that refreshes."""
        refreshes = self._walked.refreshes
        if self._walk(step):
            return refreshes[bisect_right(refreshes, step) - 1]
        _, next_refresh, period = self._rhythm
        return refreshes[-1] if step < next_refresh else step - (step - next_refresh) % period

    def _walk(self, step: int) -> bool:
        """Decide all steps up to ``step``, or up to ``settled`` if that is less; whether ``step`` is among them."""
        settled = self.settled
        for undecided in range(len(self._walked.due), min(step, settled) + 1):
            self._decide(undecided)
        return step <= settled

    def _decide(self, step: int) -> None:
        walked, (start, offset) = self._walked, self._displacement(step)
        captures = step >= walked.captures[-1] + self._update_interval(step)
        refreshes = captures and step >= walked.refreshes[-1] + self._refresh_interval(step)
        if start <= step <= start + offset:
            first = start + offset % self._update_interval(start)
            refreshes = step == start + offset
            captures = refreshes or step == first or (captures and step > first)
        walked.due.append(Due(captures, refreshes) if captures else NOTHING)
        if captures:
            walked.captures.append(step)
        if refreshes:
            walked.refreshes.append(step)

    def _displacement(self, step: int) -> tuple[int, int]:
        """Where the part of the run began that ``step`` is in, and by how much it is displaced."""
        if step < self._displaced_from:
            return 0, self.offset % self._refresh_interval(0)
        return self._displaced_from, self.offset

    @cached_property
    def _rhythm(self) -> tuple[int, int, int]:
        """After ``settled``, once it is decided: steps between captures, first refresh, steps between refreshes."""
        update, refresh = self.intervals(self.settled)
        first, last_refresh = self._walked.captures[-1], self._walked.refreshes[-1]
        next_refresh = first + update * max(1, _ceiling(last_refresh + refresh - first, update))
        return update, next_refresh, update * _ceiling(refresh, update)


def _ceiling(a: int, b: int) -> int:
    return -(-a // b)
