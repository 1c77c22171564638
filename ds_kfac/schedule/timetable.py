"""Numbers that change over steps, and which work is due at a step for which factors: a schedule,
displaced for each factor, and thinned out by SP-NGD's adaptive rule (Osawa et al. 2019,
arXiv:1811.12019)."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Value:
    """A number as a function of the step. The config checks it, as it can name the key.

    Attributes:
        kind: constant, piecewise, or a ramp: linear, cosine (half a period, flat at both ends),
            exponential.
        values: the numbers it goes through.
        steps: increasing; begin and end of a ramp, or the beginnings of the pieces after the first.
    """

    kind: str
    values: tuple[float, ...]
    steps: tuple[int, ...] = ()

    @classmethod
    def constant(cls, value: float) -> "Value":
        return cls("constant", (float(value),))

    @classmethod
    def ramp(cls, kind: str, start: float, end: float, steps: int, delay: int = 0) -> "Value":
        """``start`` for ``delay`` steps, then to ``end`` within ``steps`` steps (at least 1), where
        it stays."""
        return cls(kind, (float(start), float(end)), (delay, delay + steps))

    @classmethod
    def piecewise(cls, values: list[float], steps: list[int]) -> "Value":
        """``values[i]`` from step ``steps[i - 1]`` on; one value more than steps."""
        return cls("piecewise", tuple(map(float, values)), tuple(steps))

    def at(self, step: int) -> float:
        """The number at ``step``, the number of applied steps before it."""
        if self.kind in ("constant", "piecewise"):
            return self.values[bisect_right(self.steps, step)]
        (start, end), (first, last) = self.values, self.steps
        part = min(max((step - first) / (last - first), 0.0), 1.0)
        if self.kind == "exponential":
            return start ** (1 - part) * end**part
        part = (1 - math.cos(math.pi * part)) / 2 if self.kind == "cosine" else part
        # unlike start + part * difference, exact at both ends
        return (1 - part) * start + part * end

    def interval_at(self, step: int) -> int:
        """The number as an interval in steps: the nearest integer (a half goes up), at least 1."""
        return max(1, math.floor(self.at(step) + 0.5))

    def times(self, factor: float) -> "Value":
        return Value(self.kind, tuple(factor * value for value in self.values), self.steps)

    @property
    def settled(self) -> int:
        """The step after which it does not change."""
        return self.steps[-1] if self.steps else 0

    def __str__(self) -> str:
        numbers = [f"{value:.12g}" for value in self.values]
        if self.kind in ("constant", "piecewise"):
            later = [
                f"{number} from step {step}"
                for number, step in zip(numbers[1:], self.steps, strict=True)
            ]
            return ", ".join([numbers[0], *later])
        delay, end = self.steps
        after = f" after {delay}" if delay else ""
        return f"{self.kind} {numbers[0]} -> {numbers[1]} over {end - delay} steps{after}"


@dataclass(frozen=True)
class BurnIn:
    """Other, constant intervals for the first ``steps`` steps (at least 1), where curvature changes
    fastest."""

    steps: int
    update_interval: int
    refresh_interval: int

    def __str__(self) -> str:
        return (
            f"{self.steps} steps with intervals {self.update_interval} and {self.refresh_interval}"
        )


class Due(NamedTuple):
    """Whether a step averages its batch into the factors, and whether it decomposes them again."""

    capture: bool
    refresh: bool


@dataclass
class _Walked:
    """Steps up to ``last`` that capture, and that refresh."""

    last: int = 0
    captures: list[int] = field(default_factory=lambda: [0])
    refreshes: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class Schedule:
    """Decoupled intervals (Pauloski et al. 2020), in steps: factors every ``update``, bases less
    often.

    Step 0 captures and refreshes. A later step captures once ``update`` steps have passed since the
    last capture, and a capture refreshes once ``refresh`` steps have passed since the last refresh.
    Bases never come from old factors, so a ``refresh`` that is no multiple of ``update`` waits for
    the next capture. Intervals are read at the step in question, not at the last capture, so a
    shorter one takes effect at once.

    The burn-in's intervals hold where they are shorter. The first step after it, ``burn_in.steps``,
    captures and refreshes in any case: the longer interval starts with fresh bases.

    An ``offset`` above 0 displaces the clock from the end B of the burn-in on (B = 0 without one):
    nothing is due until B + offset % update interval, which captures in any case, and nothing
    refreshes until B + offset, which captures and refreshes. In the burn-in the same holds from
    step 1 on, with update intervals of its own in the offset, which is taken modulo its refresh
    interval.
    """

    update: Value
    refresh: Value
    burn_in: BurnIn | None = None
    offset: int = 0
    _walked: _Walked = field(default_factory=_Walked, init=False, repr=False, compare=False)

    def displaced(self, offset: int) -> "Schedule":
        """The same intervals with this ``offset`` >= 0, see the class."""
        assert offset >= 0, f"a schedule cannot be displaced by {offset} steps"
        return replace(self, offset=offset)

    @property
    def burnt_in(self) -> int:
        """The first step after the burn-in."""
        return self.burn_in.steps if self.burn_in else 0

    def intervals(self, step: int) -> tuple[int, int]:
        """Steps between captures, and between refreshes, as of ``step``."""
        update, refresh, burn_in = (
            self.update.interval_at(step),
            self.refresh.interval_at(step),
            self.burn_in,
        )
        if burn_in and step < burn_in.steps:
            return min(update, burn_in.update_interval), min(refresh, burn_in.refresh_interval)
        return update, refresh

    @cached_property
    def settled(self) -> int:
        """The step after which both intervals are constant and no offset is waited for."""
        return max(self.update.settled, self.refresh.settled, self.burnt_in + self.offset)

    def due(self, step: int) -> Due:
        """Work due at ``step`` >= 0, the number of applied steps before it; steps may be queried in
        any order. Up to ``settled`` it depends on earlier steps, whose work is cached; then it is
        periodic."""
        return Due(
            self.captures(step) > self.captures(step - 1),
            self.refreshes(step) > self.refreshes(step - 1),
        )

    def captures(self, step: int) -> int:
        """Number of the steps 0 .. ``step`` that capture; 0 for step -1."""
        return self._count("captures", step)

    def refreshes(self, step: int) -> int:
        """Number of the steps 0 .. ``step`` that refresh; 0 for step -1."""
        return self._count("refreshes", step)

    def _count(self, which: Literal["captures", "refreshes"], step: int) -> int:
        walked = self._walked
        while walked.last < min(step, self.settled):
            walked.last += 1
            self._decide(walked.last)
        found: list[int] = getattr(walked, which)
        if step <= self.settled:
            return bisect_right(found, step)
        first, interval = self._later[which]
        return len(found) + max(0, 1 + (step - first) // interval)

    def _decide(self, step: int) -> None:
        walked, (update, refresh) = self._walked, self.intervals(step)
        # of the part of the run, burn-in or not, that the step is in
        start, offset = self.burnt_in, self.offset
        if step < start:
            (each, every), later = self.intervals(0), self.intervals(start)[0]
            start, offset = 0, (offset // later * each + offset % later) % every
        captures = step >= walked.captures[-1] + update
        refreshes = captures and step >= walked.refreshes[-1] + refresh
        if start <= step <= start + offset:
            first = start + offset % self.intervals(start)[0]
            refreshes = step == start + offset
            captures = refreshes or step == first or (captures and step > first)
        walked.captures += [step] * captures
        walked.refreshes += [step] * refreshes

    @cached_property
    def _later(self) -> Mapping[str, tuple[int, int]]:
        """After ``settled``: "captures" and "refreshes" -> (the first, steps between two)."""
        (update, refresh), last = self.intervals(self.settled), self._walked.captures[-1]
        waits = self._walked.refreshes[-1] + refresh - last  # of the next refresh, for a capture
        refresh_rhythm = last + update * max(1, -(-waits // update)), update * -(-refresh // update)
        return {"captures": (last + update, update), "refreshes": refresh_rhythm}


def next_interval(
    interval: int, previous: int, similar_to_last: bool, similar_to_before: bool
) -> tuple[int, int]:
    """SP-NGD's rule: the next (interval, previous), in units of the ordinary interval. The interval
    is halved after a change, kept after a small one, else it grows: 1, 2, 3, 5, 8, ...
    ``previous``, the interval before the last growth, never exceeds it, so that after halvings it
    grows to the double at most."""
    if not similar_to_last:
        interval = max(1, interval // 2)
        return interval, min(previous, interval)
    if not similar_to_before:
        return interval, previous
    return interval + previous, interval


def _first(reached: Callable[[int], bool], step: int) -> int:
    """The first step from ``step`` on that has ``reached`` what all later ones have, too."""
    low, high = step - 1, step
    while not reached(high):
        low, high = high, 3 * high - 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


Keys = frozenset[str]
Similar = Mapping[str, tuple[bool, bool] | None]


@dataclass(frozen=True)
class FactorsDue:
    """Factors into which this step's batch is averaged, and those of them that are decomposed
    again."""

    capture: Keys
    refresh: Keys


NOTHING = FactorsDue(frozenset(), frozenset())
SIMILAR_TO_LAST = 1
SIMILAR_TO_BEFORE = 2
NO_BATCH = 4.0
"""Code of a factor's similarities: the sum of those of the first two that hold, or NO_BATCH where
the factor had no batch to compare."""
AHEAD = 1000
"""Most steps to look ahead for the next one at which anything is due."""


@dataclass(frozen=True)
class _Clock:
    """The adaptive rule's state of a factor: its intervals, and the steps of its last capture and
    refresh."""

    interval: int = 1
    previous: int = 1
    captured: int = -1
    refreshed: int = -1


class Timetable:
    """When each factor is captured and refreshed; the same on every rank that records the same.

    Without an adaptive rule it depends on the step alone. With one, after the burn-in, a factor
    takes part in every n-th capture of its schedule, n its interval, and then refreshes if its
    schedule has refreshed in the meantime.

    Args:
        keys: keys of all factors.
        offsets: key -> steps by which its schedule is displaced, see :meth:`Schedule.displaced`; 0
            if missing.

    Attributes:
        clocks: key -> state of the adaptive rule.
        captured, skipped: numbers of factors' captures that were recorded, and that the rule left
            out.
    """

    def __init__(
        self,
        schedule: Schedule,
        keys: Sequence[str],
        *,
        offsets: Mapping[str, int] | None = None,
        adaptive: bool = False,
    ) -> None:
        offsets = offsets or {}
        assert offsets.keys() <= set(keys), (
            f"offsets of unknown factors {sorted(offsets.keys() - set(keys))}"
        )
        groups: dict[int, list[str]] = {}
        for key in keys:
            groups.setdefault(offsets.get(key, 0), []).append(key)
        self._groups = tuple(
            (schedule.displaced(offset), frozenset(group)) for offset, group in groups.items()
        )
        self._schedules = {key: displaced for displaced, group in self._groups for key in group}
        self.keys, self.adaptive, self._adaptive_from = frozenset(keys), adaptive, schedule.burnt_in
        self._quiet = range(0)  # steps at which no schedule captures
        self._cached: tuple[int, FactorsDue] | None = None  # the last step queried, and its work
        self._unread: tuple[int, FactorsDue, Callable[[], Sequence[float]]] | None = None
        self.restore({})

    def due(self, step: int) -> FactorsDue:
        """Factors due at ``step``, the number of applied steps before it. Costs nothing if there
        are none."""
        if step in self._quiet:
            return NOTHING
        if self._unread is not None and self.captures_possible(step):
            self.settle()
        if self._cached is None or self._cached[0] != step:
            self._cached = step, self._due(step)
            ahead = range(step + 1, step + AHEAD)
            self._quiet = range(step + 1, next(filter(self.captures_possible, ahead), step + AHEAD))
        return self._cached[1]

    def captures_possible(self, step: int) -> bool:
        """Whether any factor's schedule captures at ``step``; the adaptive rule may still skip
        it."""
        return step not in self._quiet and any(
            schedule.due(step).capture for schedule, _ in self._groups
        )

    def next_due(self, key: str, step: int) -> tuple[int, int]:
        """The first steps, ``step`` or later, at which the factor is captured, and refreshed; with
        an adaptive rule as far as its interval stays. Waits for the device like :meth:`settle`."""
        self.settle()
        schedule, clock = self._schedules[key], self.clocks[key]
        if not self.adaptive or step < self._adaptive_from:
            clock = _Clock(captured=step - 1, refreshed=step - 1)
        before, refreshes = (
            schedule.captures(clock.captured) + clock.interval - 1,
            schedule.refreshes(clock.refreshed),
        )
        before = max(schedule.captures(step - 1), before)
        capture = _first(lambda later: schedule.captures(later) > before, step)
        refreshed = _first(lambda later: schedule.refreshes(later) > refreshes, capture)
        sat_out = -(-(schedule.captures(refreshed) - before - 1) // clock.interval) * clock.interval
        return capture, _first(lambda later: schedule.captures(later) > before + sat_out, capture)

    def exact(self, key: str, step: int, every: int) -> bool:
        """Whether a refresh at ``step`` decomposes from scratch, not from the last result: in the
        burn-in, at the first refresh after it, and at every ``every``-th one from there on; with an
        adaptive rule at the next one that the factor takes part in. Depends only on the step and on
        what a checkpoint has."""
        schedule = self._schedules[key]
        start = schedule.burnt_in
        before = max(self.clocks[key].refreshed if self.adaptive else step - 1, start - 1)
        if step < start:
            return True
        first = schedule.refreshes(start - 1)
        past, now = (-(-(schedule.refreshes(at) - first) // every) for at in (before, step))
        return now > past

    def settle(self) -> None:
        """Read similarities that were recorded as a function, see :meth:`record`; waits for the
        device."""
        if self._unread is not None:
            (step, due, read), self._unread = self._unread, None
            codes = zip(sorted(due.capture), map(int, read()), strict=True)
            flags = {key: _similarities(code) for key, code in codes}
            self.record(step, due, flags)

    def record(
        self, step: int, due: FactorsDue, similar: Similar | Callable[[], Sequence[float]]
    ) -> None:
        """After each applied step: count its captures, and set the next intervals of the factors
        captured in it.

        Args:
            due: the work that was done at ``step``: ``due(step)``, or more.
            similar: key of a captured factor -> whether it is similar to its last value, and to the
                one before; read after the burn-in with an adaptive rule only. None of one that had
                no batch: it keeps its interval. Or a function that reads them from the device: for
                each of ``sorted(due.capture)`` :data:`SIMILAR_TO_LAST` and
                :data:`SIMILAR_TO_BEFORE` added up, or :data:`NO_BATCH`. It is called at the next
                step that might capture.
        """
        if callable(similar):
            self.settle()
            self._unread = step, due, similar
            return
        self.captured += len(due.capture)
        if not self.adaptive:
            return
        self.skipped += sum(
            len(group - due.capture)
            for schedule, group in self._groups
            if schedule.due(step).capture
        )
        for key in due.capture:
            clock = replace(self.clocks[key], captured=step)
            if step >= self._adaptive_from and (flags := similar[key]) is not None:
                interval, previous = next_interval(clock.interval, clock.previous, *flags)
                clock = replace(clock, interval=interval, previous=previous)
            self.clocks[key] = clock
        for key in due.refresh:
            self.clocks[key] = replace(self.clocks[key], refreshed=step)
        self._cached = None

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as plain numbers, strings, lists and dicts."""
        self.settle()
        clocks = self.clocks.items() if self.adaptive else ()
        factors = {
            key: [clock.interval, clock.previous, clock.captured, clock.refreshed]
            for key, clock in clocks
        }
        return {"captured": self.captured, "skipped": self.skipped, "factors": factors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. Factors that are not in it start with interval 1, and
        refresh at their next capture; those of another model are ignored."""
        self.clocks = dict.fromkeys(self.keys, _Clock())
        self._cached = self._unread = None
        self.captured, self.skipped = state.get("captured", 0), state.get("skipped", 0)
        if self.adaptive:
            saved = state.get("factors", {})
            self.clocks |= {
                key: _Clock(*numbers) for key, numbers in saved.items() if key in self.keys
            }

    def _due(self, step: int) -> FactorsDue:
        capture, refresh = set[str](), set[str]()
        adapts = self.adaptive and step >= self._adaptive_from
        for schedule, group in self._groups:
            due = schedule.due(step)
            if due.capture and not adapts:
                capture |= group
                refresh |= group if due.refresh else frozenset()
            elif due.capture:
                captures, refreshes = schedule.captures(step), schedule.refreshes(step)
                for key in group:
                    clock = self.clocks[key]
                    if captures - schedule.captures(clock.captured) >= clock.interval:
                        capture.add(key)
                        if refreshes > schedule.refreshes(clock.refreshed):
                            refresh.add(key)
        return FactorsDue(frozenset(capture), frozenset(refresh))


def _similarities(code: int) -> tuple[bool, bool] | None:
    """Return what a code says: whether a factor is similar to its last value, and to the one
    before; None if it had no batch."""
    if code == NO_BATCH:
        return None
    return bool(code & SIMILAR_TO_LAST), bool(code & SIMILAR_TO_BEFORE)
