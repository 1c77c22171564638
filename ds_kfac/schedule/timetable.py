"""Settings whose value depends on the step, and the timetable. The timetable decides in which steps
each factor is captured (updated with a batch) and in which steps it is decomposed.

All factors follow one schedule. A factor may follow it with an offset of some steps, and SP-NGD's
adaptive rule (Osawa et al. 2019, arXiv:1811.12019) may skip some of the factor's captures.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Value:
    """A number as a function of the step. This class does not check its fields. The config checks
    them, because its errors can name the config's key.

    Attributes:
        kind: "constant", "piecewise", or one of the ramps "linear", "cosine" (half a period, flat
            at both ends) and "exponential".
        values: start and end value of a ramp, or the value of each piece.
        steps: for a ramp, the steps at which it starts and ends; for pieces, the first step of each
            piece except the first piece. In increasing order.
    """

    kind: str
    values: tuple[float, ...]
    steps: tuple[int, ...] = ()

    @classmethod
    def constant(cls, value: float) -> "Value":
        return cls("constant", (float(value),))

    @classmethod
    def ramp(cls, kind: str, start: float, end: float, steps: int, delay: int = 0) -> "Value":
        """Return a value that is ``start`` for ``delay`` steps, then moves to ``end`` within
        ``steps`` steps (at least 1), and stays there."""
        return cls(kind, (float(start), float(end)), (delay, delay + steps))

    @classmethod
    def piecewise(cls, values: list[float], steps: list[int]) -> "Value":
        """Return a value that is ``values[0]`` at first, and changes to ``values[i]`` at step
        ``steps[i - 1]``. ``values`` has one entry more than ``steps``."""
        return cls("piecewise", tuple(map(float, values)), tuple(steps))

    def at(self, step: int) -> float:
        """Return the number at ``step``. Steps are counted from 0."""
        if self.kind in ("constant", "piecewise"):
            return self.values[bisect_right(self.steps, step)]
        (start, end), (first, last) = self.values, self.steps
        part = min(max((step - first) / (last - first), 0.0), 1.0)
        if self.kind == "exponential":
            return start ** (1 - part) * end**part
        if self.kind == "cosine":
            part = (1 - math.cos(math.pi * part)) / 2
        # this is exact at both ends, unlike start + part * (end - start)
        return (1 - part) * start + part * end

    def interval_at(self, step: int) -> int:
        """Return the number as an interval in steps: rounded to the nearest integer (a half is
        rounded up), and at least 1."""
        return max(1, math.floor(self.at(step) + 0.5))

    def times(self, factor: float) -> "Value":
        return Value(self.kind, tuple(factor * value for value in self.values), self.steps)

    @property
    def settled(self) -> int:
        """The step after which the number does not change."""
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
    """Separate, constant intervals for the first ``steps`` steps (at least 1), in which curvature
    changes fastest."""

    steps: int
    update_interval: int
    refresh_interval: int

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, with factors every {self.update_interval} and refreshes every "
            f"{self.refresh_interval}"
        )


class Due(NamedTuple):
    """Two flags of a step: whether it adds its batch to the factors' averages, and whether it
    decomposes the factors again."""

    capture: bool
    refresh: bool


@dataclass
class _Walked:
    """The part of a schedule that has been computed so far: a list of the captures and a list of
    the refreshes, both up to step ``last``."""

    last: int = 0
    captures: list[int] = field(default_factory=lambda: [0])
    refreshes: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class Schedule:
    """Two intervals in steps (Pauloski et al. 2020). Factors are captured every ``update`` steps,
    and refreshed, that is, decomposed again, every ``refresh`` steps.

    Step 0 captures and refreshes. A later step captures if at least ``update`` steps have passed
    since the last capture. A capture refreshes if at least ``refresh`` steps have passed since the
    last refresh. Only steps that capture can refresh, so that new bases are never computed from old
    factors. If ``refresh`` is not a multiple of ``update``, a refresh waits for the next capture.
    Intervals are evaluated at the current step, not at the last capture, so a shorter interval
    takes effect at once.

    Note: Burn-in. During the burn-in, an interval of ``burn_in`` applies if it is shorter than the
    ordinary interval. The first step after the burn-in, which is step ``burn_in.steps``, always
    captures and refreshes, so that the longer interval starts with fresh bases.

    Note: Offset. An ``offset`` above 0 displaces the schedule from step B on, where B is the first
    step after the burn-in, or 0 without a burn-in. From B on, the first capture is at step
    B + offset % u, where u is the update interval. The first refresh is at step B + offset, and
    this step also captures. During the burn-in the same rule applies from step 1 on, with another
    offset: if offset = k u + r with 0 <= r < u, the offset in the burn-in is (k u' + r) % v'. Here
    u' and v' are the update and refresh intervals of the burn-in.
    """

    update: Value
    refresh: Value
    burn_in: BurnIn | None = None
    offset: int = 0
    _walked: _Walked = field(default_factory=_Walked, init=False, repr=False, compare=False)

    def displaced(self, offset: int) -> "Schedule":
        """Return the same schedule with this ``offset`` >= 0, see "Note: Offset"."""
        assert offset >= 0, f"a schedule cannot be displaced by {offset} steps"
        return replace(self, offset=offset)

    @property
    def burnt_in(self) -> int:
        """The first step after the burn-in."""
        return self.burn_in.steps if self.burn_in else 0

    def intervals(self, step: int) -> tuple[int, int]:
        """Return (number of steps between captures, number of steps between refreshes), as they are
        at ``step``."""
        update = self.update.interval_at(step)
        refresh = self.refresh.interval_at(step)
        burn_in = self.burn_in
        if burn_in and step < burn_in.steps:
            return min(update, burn_in.update_interval), min(refresh, burn_in.refresh_interval)
        return update, refresh

    @cached_property
    def settled(self) -> int:
        """The step after which the schedule is periodic. After it, both intervals are constant, and
        the displaced first refresh has passed."""
        return max(self.update.settled, self.refresh.settled, self.burnt_in + self.offset)

    def due(self, step: int) -> Due:
        """Return the work that is due at a step. Steps may be queried in any order.

        Up to step ``settled`` the work depends on earlier steps, so it is computed step by step and
        cached. After step ``settled`` the work is periodic.

        Args:
            step: number of steps applied before this one, at least 0.
        """
        return Due(
            self.captures(step) > self.captures(step - 1),
            self.refreshes(step) > self.refreshes(step - 1),
        )

    def captures(self, step: int) -> int:
        """Return the number of captures in the steps 0 .. ``step``; 0 for step -1."""
        self._walk(step)
        walked = self._walked.captures
        if step <= self.settled:
            return bisect_right(walked, step)
        return len(walked) + self._later_captures.count(step)

    def refreshes(self, step: int) -> int:
        """Return the number of refreshes in the steps 0 .. ``step``; 0 for step -1."""
        self._walk(step)
        walked = self._walked.refreshes
        if step <= self.settled:
            return bisect_right(walked, step)
        return len(walked) + self._later_refreshes.count(step)

    def _walk(self, step: int) -> None:
        """Compute the schedule up to ``step``, or up to ``settled``."""
        walked = self._walked
        while walked.last < min(step, self.settled):
            walked.last += 1
            self._decide(walked.last)

    def _decide(self, step: int) -> None:
        """Decide whether a step captures and whether it refreshes. All steps before it must have
        been decided."""
        walked = self._walked
        update, refresh = self.intervals(step)
        captures = step >= walked.captures[-1] + update
        refreshes = captures and step >= walked.refreshes[-1] + refresh
        # `start` is the first step of the phase that contains the step: the burn-in, or the time
        # after it
        start = self.burnt_in
        offset = self.offset
        if step < start:
            start = 0
            offset = self._offset_in_burn_in()
        if start <= step <= start + offset:
            update_at_start, _ = self.intervals(start)
            first_capture = start + offset % update_at_start
            refreshes = step == start + offset
            captures = refreshes or step == first_capture or (captures and step > first_capture)
        if captures:
            walked.captures.append(step)
        if refreshes:
            walked.refreshes.append(step)

    def _offset_in_burn_in(self) -> int:
        """Return the offset that applies in the burn-in, see "Note: Offset"."""
        update, refresh = self.intervals(0)
        update_after, _ = self.intervals(self.burnt_in)
        intervals, rest = divmod(self.offset, update_after)
        return (intervals * update + rest) % refresh

    @cached_property
    def _later_captures(self) -> "_Rhythm":
        """The steps after ``settled`` that capture."""
        update, _ = self.intervals(self.settled)
        return _Rhythm(self._walked.captures[-1] + update, update)

    @cached_property
    def _later_refreshes(self) -> "_Rhythm":
        """The steps after ``settled`` that refresh. A refresh waits for a capture. So the interval
        between refreshes, and the time from the last capture to the first of these refreshes, are
        multiples of the update interval."""
        update, refresh = self.intervals(self.settled)
        last_capture = self._walked.captures[-1]
        wait = self._walked.refreshes[-1] + refresh - last_capture
        first = last_capture + update * max(1, -(-wait // update))
        return _Rhythm(first, update * -(-refresh // update))


class _Rhythm(NamedTuple):
    """The steps first, first + interval, first + 2 interval, and so on."""

    first: int
    interval: int

    def count(self, step: int) -> int:
        """Return how many of these steps are at or before ``step``."""
        return max(0, 1 + (step - self.first) // self.interval)


def next_interval(
    interval: int, previous: int, similar_to_last: bool, similar_to_before: bool
) -> tuple[int, int]:
    """Return the next (interval, previous) of a factor by SP-NGD's rule, in units of the ordinary
    interval.

    If the factor is not similar to its previous value, the interval is halved. If it is similar to
    the previous value but not to the value before that, the interval stays the same. If it is
    similar to both, the interval grows: 1, 2, 3, 5, 8, ... ``previous`` is the interval before the
    last growth. It never exceeds ``interval``, so the interval at most doubles.
    """
    if not similar_to_last:
        interval = max(1, interval // 2)
        return interval, min(previous, interval)
    if not similar_to_before:
        return interval, previous
    return interval + previous, interval


def _first(reached: Callable[[int], bool], step: int) -> int:
    """Return the first step, not before ``step``, for which ``reached`` is true. ``reached`` must
    also be true for all later steps."""
    low = step - 1
    high = step
    while not reached(high):
        low, high = high, high + 2 * (high - low)
    while high - low > 1:
        middle = (low + high) // 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high


Keys = frozenset[str]
Similar = Mapping[str, tuple[bool, bool] | None]


@dataclass(frozen=True)
class FactorsDue:
    """Keys of the factors that a step captures, and keys of the factors that it refreshes."""

    capture: Keys
    refresh: Keys


NOTHING = FactorsDue(frozenset(), frozenset())
SIMILAR_TO_LAST = 1
SIMILAR_TO_BEFORE = 2
NO_BATCH = 4.0
"""Similarity code of a factor that had no batch. The code of any other factor is the sum of
SIMILAR_TO_LAST, if the factor is similar to its previous value, and SIMILAR_TO_BEFORE, if it is
similar to the value before that."""
AHEAD = 1000
"""Largest number of steps that :meth:`Timetable.due` looks ahead for the next step with work."""


@dataclass(frozen=True)
class _Unread:
    """Similarity codes of a step that have not been read from the device yet, see
    :meth:`Timetable.record`."""

    step: int
    due: FactorsDue
    read: Callable[[], Sequence[float]]


@dataclass(frozen=True)
class _Clock:
    """The adaptive rule's state for one factor.

    Attributes:
        interval, previous: see :func:`next_interval`.
        captured, refreshed: steps of the last capture and refresh; -1 before the first one.
    """

    interval: int = 1
    previous: int = 1
    captured: int = -1
    refreshed: int = -1


class Timetable:
    """Decides in which steps each factor is captured and refreshed. Ranks that make the same calls
    of :meth:`record` get the same answers.

    Without the adaptive rule, the answers depend only on the step. With the adaptive rule, after
    the burn-in, a factor takes part in every n-th capture of its schedule, where n is the factor's
    interval. In such a capture the factor is refreshed if its schedule has had a refresh since the
    factor's last refresh.

    Args:
        keys: keys of all factors.
        offsets: factor key -> number of steps by which the factor's schedule is displaced, see
            :meth:`Schedule.displaced`. Factors without an entry have the offset 0.

    Attributes:
        clocks: factor key -> state of the adaptive rule.
        captured: number of captures that were recorded, summed over factors.
        skipped: number of captures that the adaptive rule left out, summed over factors.
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
        self.keys = frozenset(keys)
        self.adaptive = adaptive
        self._adaptive_from = schedule.burnt_in
        self._quiet = range(0)  # steps at which no schedule captures
        self._cached: tuple[int, FactorsDue] | None = None  # the last queried step, and its work
        self._unread: _Unread | None = None
        self.restore({})

    def due(self, step: int) -> FactorsDue:
        """Return the factors that are due at ``step``. The call is cheap if no factor is due."""
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
        """Return whether any factor's schedule has a capture at ``step``. The adaptive rule may
        still skip it."""
        return step not in self._quiet and any(
            schedule.due(step).capture for schedule, _ in self._groups
        )

    def next_due(self, key: str, step: int) -> tuple[int, int]:
        """Return the next step that captures the factor, and the next step that refreshes it. Both
        are at or after ``step``. With the adaptive rule, the answers assume that the factor's
        interval does not change. May synchronise with the device, see :meth:`settle`."""
        self.settle()
        schedule = self._schedules[key]
        clock = self.clocks[key]
        if not self.adaptive or step < self._adaptive_from:
            clock = _Clock(captured=step - 1, refreshed=step - 1)
        # number of captures in the schedule before the one in which the factor takes part
        skipped_until = schedule.captures(clock.captured) + clock.interval - 1
        before = max(schedule.captures(step - 1), skipped_until)
        capture = _first(lambda later: schedule.captures(later) > before, step)
        # find the schedule's next refresh, and then the first capture from there on in which the
        # factor takes part
        refreshes = schedule.refreshes(clock.refreshed)
        due_from = _first(lambda later: schedule.refreshes(later) > refreshes, capture)
        captures_between = schedule.captures(due_from) - before - 1
        passed = -(-captures_between // clock.interval) * clock.interval
        refresh = _first(lambda later: schedule.captures(later) > before + passed, capture)
        return capture, refresh

    def exact(self, key: str, step: int, every: int) -> bool:
        """Return whether a refresh at ``step`` decomposes the factor from scratch instead of
        iterating from its previous decomposition.

        The following refreshes decompose from scratch: all refreshes in the burn-in, the schedule's
        first refresh after the burn-in, and every ``every``-th refresh after that. If the adaptive
        rule skips such a refresh, the factor's next refresh is from scratch. The answer depends
        only on the step and on state that checkpoints contain.
        """
        schedule = self._schedules[key]
        start = schedule.burnt_in
        if step < start:
            return True
        last_refresh = max(self.clocks[key].refreshed if self.adaptive else step - 1, start - 1)
        in_burn_in = schedule.refreshes(start - 1)

        def exact_refreshes(until: int) -> int:
            """Return how many of the schedule's refreshes up to a step are from scratch."""
            return -(-(schedule.refreshes(until) - in_burn_in) // every)

        return exact_refreshes(step) > exact_refreshes(last_refresh)

    def settle(self) -> None:
        """If the last call of :meth:`record` was given a function, call it, and record the
        similarities that it returns. This synchronises with the device."""
        if self._unread is None:
            return
        unread = self._unread
        self._unread = None
        codes = zip(sorted(unread.due.capture), map(int, unread.read()), strict=True)
        flags = {key: _similarities(code) for key, code in codes}
        self.record(unread.step, unread.due, flags)

    def record(
        self, step: int, due: FactorsDue, similar: Similar | Callable[[], Sequence[float]]
    ) -> None:
        """Count the captures of a step, and set the next intervals of the captured factors. Call
        this after each applied step.

        Args:
            due: factors that were captured and refreshed at ``step``: all factors of ``due(step)``,
                and possibly more.
            similar: dict from the key of a captured factor to two flags: whether the factor is
                similar to its previous value, and to the value before that. If a factor had no
                batch, its entry is None, and it keeps its interval. The dict is read only with the
                adaptive rule, and only after the burn-in. ``similar`` may also be a function that
                reads the similarities from the device, and returns a code (see :data:`NO_BATCH`)
                for each key in ``sorted(due.capture)``. The function is called at the next step
                that might capture.
        """
        if callable(similar):
            self.settle()
            self._unread = _Unread(step, due, similar)
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
            flags = similar[key] if step >= self._adaptive_from else None
            if flags is not None:
                interval, previous = next_interval(clock.interval, clock.previous, *flags)
                clock = replace(clock, interval=interval, previous=previous)
            self.clocks[key] = clock
        for key in due.refresh:
            self.clocks[key] = replace(self.clocks[key], refreshed=step)
        self._cached = None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It consists of plain numbers, strings, lists and
        dicts."""
        self.settle()
        clocks = self.clocks.items() if self.adaptive else ()
        factors = {
            key: [clock.interval, clock.previous, clock.captured, clock.refreshed]
            for key, clock in clocks
        }
        return {"captured": self.captured, "skipped": self.skipped, "factors": factors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of :meth:`state`. Factors that are not in the state start with
        interval 1, and refresh at their next capture. Keys in the state that are unknown to this
        timetable are ignored."""
        self.clocks = dict.fromkeys(self.keys, _Clock())
        self._cached = self._unread = None
        self.captured = state.get("captured", 0)
        self.skipped = state.get("skipped", 0)
        if self.adaptive:
            saved = state.get("factors", {})
            self.clocks |= {
                key: _Clock(*numbers) for key, numbers in saved.items() if key in self.keys
            }

    def _due(self, step: int) -> FactorsDue:
        capture = set[str]()
        refresh = set[str]()
        adapts = self.adaptive and step >= self._adaptive_from
        for schedule, group in self._groups:
            due = schedule.due(step)
            if due.capture and not adapts:
                capture |= group
                refresh |= group if due.refresh else frozenset()
            elif due.capture:
                captures = schedule.captures(step)
                refreshes = schedule.refreshes(step)
                for key in group:
                    clock = self.clocks[key]
                    if captures - schedule.captures(clock.captured) >= clock.interval:
                        capture.add(key)
                        if refreshes > schedule.refreshes(clock.refreshed):
                            refresh.add(key)
        return FactorsDue(frozenset(capture), frozenset(refresh))


def _similarities(code: int) -> tuple[bool, bool] | None:
    """Decode a code, see :data:`NO_BATCH`. Return (whether the factor is similar to its previous
    value, whether it is similar to the value before that), or None if the factor had no batch."""
    if code == NO_BATCH:
        return None
    return bool(code & SIMILAR_TO_LAST), bool(code & SIMILAR_TO_BEFORE)
