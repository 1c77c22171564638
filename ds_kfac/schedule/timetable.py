"""When: numbers that change over steps, which work is due at a step, and for which factors: the schedule, displaced
factor by factor, and thinned out by SP-NGD's adaptive rule (Osawa et al. 2019, arXiv:1811.12019)."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

KINDS = ("constant", "linear", "cosine", "exponential", "piecewise")


@dataclass(frozen=True)
class Value:
    """A number over steps. Not checked here: config does, and names the key.

    Attributes:
        kind: one of ``KINDS``. Ramps go from one value to another: linear, cosine (half of one, flat at both ends),
            exponential (by the same factor every step).
        values: the numbers it passes through.
        steps: increasing; where a ramp begins and ends, or where the pieces after the first begin.
    """

    kind: str
    values: tuple[float, ...]
    steps: tuple[int, ...] = ()

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
        if self.kind in ("constant", "piecewise"):
            return self.values[bisect_right(self.steps, step)]
        (start, end), (first, last) = self.values, self.steps
        part = min(max((step - first) / (last - first), 0.0), 1.0)
        if self.kind == "exponential":
            return start ** (1 - part) * end**part
        part = (1 - math.cos(math.pi * part)) / 2 if self.kind == "cosine" else part
        return (1 - part) * start + part * end  # unlike start + part * difference, exact at both ends

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
        if self.kind in ("constant", "piecewise"):
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


class Due(NamedTuple):
    """Whether a step folds its batch into the factors, and whether it decomposes them again."""

    capture: bool
    refresh: bool


@dataclass
class _Walked:
    """The steps up to ``last`` are decided: which of them capture and refresh."""

    last: int = 0
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

    @property
    def burnt_in(self) -> int:
        """The first step after the burn-in."""
        return self.burn_in.steps if self.burn_in else 0

    def intervals(self, step: int) -> tuple[int, int]:
        """Steps between captures and between refreshes that hold at ``step``."""
        update, refresh, burn_in = self.update.interval_at(step), self.refresh.interval_at(step), self.burn_in
        if burn_in and step < burn_in.steps:
            return min(update, burn_in.update_interval), min(refresh, burn_in.refresh_interval)
        return update, refresh

    @cached_property
    def settled(self) -> int:
        """The step from which on both intervals no longer change, and from which on no offset is waited for."""
        return max(self.update.settled, self.refresh.settled, self.burnt_in + self.offset)

    def due(self, step: int) -> Due:
        """Work due at ``step`` >= 0, the number of applied steps before it, in whatever order steps are asked about.

        Up to ``settled`` it depends on the steps before, which are decided once and kept; after it, it is periodic.
        """
        return Due(self.captures(step) > self.captures(step - 1), self.last_refresh(step) == step)

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

    def refreshes(self, step: int) -> int:
        """How many of the steps 0 .. ``step`` refresh; 0 for step -1."""
        refreshes = self._walked.refreshes
        if self._walk(step):
            return bisect_right(refreshes, step)
        _, next_refresh, period = self._rhythm
        return len(refreshes) + max(0, 1 + (step - next_refresh) // period)

    def _walk(self, step: int) -> bool:
        """Decide all steps up to ``step``, or up to ``settled`` if that is less; whether ``step`` is among them."""
        walked = self._walked
        while walked.last < min(step, self.settled):
            walked.last += 1
            self._decide(walked.last)
        return step <= self.settled

    def _decide(self, step: int) -> None:
        walked, (update, refresh) = self._walked, self.intervals(step)
        start, offset = self.burnt_in, self.offset  # of the part of the run that the step is in
        if step < start:
            start, offset = 0, offset % self.intervals(0)[1]
        captures = step >= walked.captures[-1] + update
        refreshes = captures and step >= walked.refreshes[-1] + refresh
        if start <= step <= start + offset:
            first = start + offset % self.intervals(start)[0]
            refreshes = step == start + offset
            captures = refreshes or step == first or (captures and step > first)
        walked.captures += [step] * captures
        walked.refreshes += [step] * refreshes

    @cached_property
    def _rhythm(self) -> tuple[int, int, int]:
        """After ``settled``, once it is decided: steps between captures, first refresh, steps between refreshes."""
        update, refresh = self.intervals(self.settled)
        first, last_refresh = self._walked.captures[-1], self._walked.refreshes[-1]
        next_refresh = first + update * max(1, -(-(last_refresh + refresh - first) // update))
        return update, next_refresh, update * -(-refresh // update)


def next_interval(interval: int, previous: int, similar_to_last: bool, similar_to_before: bool) -> tuple[int, int]:
    """How an interval follows a factor's change, SP-NGD's; in units of the ordinary one: the next (interval, previous),
    halved after a change, kept after a small one, else 1, 2, 3, 5, 8, ...

    ``previous`` is the interval before the last growth. It never exceeds ``interval``, so that growth after some
    halvings at most doubles.
    """
    if not similar_to_last:
        interval = max(1, interval // 2)
        return interval, min(previous, interval)
    if not similar_to_before:
        return interval, previous
    return interval + previous, interval


Keys = frozenset[str]
Similar = Mapping[str, tuple[bool, bool]]


@dataclass(frozen=True)
class FactorsDue:
    """Factors to fold this step's batch into, and those of them to decompose again."""

    capture: Keys
    refresh: Keys


NOTHING = FactorsDue(frozenset(), frozenset())
AHEAD = 1000
"""Steps that are looked ahead at most for the next one at which anything is due."""


@dataclass(frozen=True)
class _Clock:
    """Where the adaptive rule is with a factor: its intervals, and the steps it was last captured and refreshed at."""

    interval: int = 1
    previous: int = 1
    captured: int = -1
    refreshed: int = -1


class Timetable:
    """When each factor is captured and refreshed. The same on every rank that records the same.

    Without an adaptive rule this is a function of the step alone. With one, from the end of the burn-in on, a factor
    takes part in one of so many captures of its schedule, its interval, and then refreshes if its schedule refreshed in
    the meantime.

    Args:
        keys: all factors.
        offsets: steps by which factors are displaced, see :meth:`Schedule.displaced`; 0 for those not in it.

    Attributes:
        clocks: key -> intervals and last steps; ``interval``: captures of its schedule that the next one stands for.
        captured, skipped: captures of factors that were recorded, and those that the rule left out of the schedule.
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
        assert offsets.keys() <= set(keys), f"offsets of unknown factors {sorted(offsets.keys() - set(keys))}"
        groups: dict[int, list[str]] = {}
        for key in keys:
            groups.setdefault(offsets.get(key, 0), []).append(key)
        self._groups = tuple((schedule.displaced(offset), frozenset(group)) for offset, group in groups.items())
        self.keys, self.adaptive, self._adaptive_from = frozenset(keys), adaptive, schedule.burnt_in
        self._quiet = range(0)  # steps at which no schedule captures
        self._asked: tuple[int, FactorsDue] | None = None
        self._unread: tuple[int, FactorsDue, Callable[[], Sequence[float]]] | None = None
        self.restore({})

    def due(self, step: int) -> FactorsDue:
        """Factors due at ``step``, the count of applied steps before it. Between two of them that have any, one that
        has none costs nothing."""
        if step in self._quiet:
            return NOTHING
        if self._unread is not None and self.captures_possible(step):
            self.settle()
        if self._asked is None or self._asked[0] != step:
            self._asked = step, self._found(step)
            ahead = range(step + 1, step + AHEAD)
            self._quiet = range(step + 1, next(filter(self.captures_possible, ahead), step + AHEAD))
        return self._asked[1]

    def captures_possible(self, step: int) -> bool:
        """Whether any factor's schedule captures at ``step``, whatever the adaptive rule makes of it."""
        return step not in self._quiet and any(schedule.due(step).capture for schedule, _ in self._groups)

    def exact(self, key: str, step: int, every: int) -> bool:
        """Whether a factor that is refreshed at ``step`` is decomposed from nothing, and not from its last result: in
        the burn-in, at the first refresh after it, and at one of ``every`` from there on; with an adaptive rule at the
        first that it does not sit out. A function of the step and of what a checkpoint has."""
        schedule = next(own for own, group in self._groups if key in group)
        start = schedule.burnt_in
        before = max(self.clocks[key].refreshed if self.adaptive else step - 1, start - 1)
        if step < start:
            return True
        first = schedule.refreshes(start - 1)
        past, now = (-(-(schedule.refreshes(at) - first) // every) for at in (before, step))
        return now > past

    def settle(self) -> None:
        """Wait for what is still to be read."""
        if self._unread is not None:
            (step, due, read), self._unread = self._unread, None
            codes = zip(sorted(due.capture), map(int, read()), strict=True)
            self.record(step, due, {key: (bool(code & 1), bool(code & 2)) for key, code in codes})

    def record(self, step: int, due: FactorsDue, similar: Similar | Callable[[], Sequence[float]]) -> None:
        """After an applied step, any: count, and set the next intervals of the factors captured in it.

        Args:
            due: what was done at ``step``; ``due(step)``, or more.
            similar: of each captured factor, whether it is similar to itself at its last refresh before this step, and
                at the one before that; read if adaptive and past the burn-in only. Or what reads that from a device, 1
                and 2 added up for each of ``sorted(due.capture)``: when the next step that might capture asks, long
                after, so that nobody waits.
        """
        if callable(similar):
            self._unread = step, due, similar
            return
        self.captured += len(due.capture)
        if not self.adaptive:
            return
        self.skipped += sum(len(group - due.capture) for schedule, group in self._groups if schedule.due(step).capture)
        for key in due.capture:
            clock = replace(self.clocks[key], captured=step)
            if step >= self._adaptive_from:
                interval, previous = next_interval(clock.interval, clock.previous, *similar[key])
                clock = replace(clock, interval=interval, previous=previous)
            self.clocks[key] = clock
        for key in due.refresh:
            self.clocks[key] = replace(self.clocks[key], refreshed=step)
        self._asked = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint, of all applied steps; plain numbers, strings, lists and dicts."""
        self.settle()
        clocks = self.clocks.items() if self.adaptive else ()
        factors = {key: [clock.interval, clock.previous, clock.captured, clock.refreshed] for key, clock in clocks}
        return {"captured": self.captured, "skipped": self.skipped, "factors": factors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. Factors that are not in it start afresh: all intervals 1, refreshed at the next
        capture; those of another model are ignored."""
        self.clocks = dict.fromkeys(self.keys, _Clock())
        self._asked = self._unread = None
        self.captured, self.skipped = state.get("captured", 0), state.get("skipped", 0)
        if self.adaptive:
            known = {key: _Clock(*numbers) for key, numbers in state.get("factors", {}).items() if key in self.keys}
            self.clocks |= known

    def _found(self, step: int) -> FactorsDue:
        capture, refresh = set[str](), set[str]()
        adapts = self.adaptive and step >= self._adaptive_from
        for schedule, group in self._groups:
            due = schedule.due(step)
            if due.capture and not adapts:
                capture |= group
                refresh |= group if due.refresh else frozenset()
            elif due.capture:
                captures, last_refresh = schedule.captures(step), schedule.last_refresh(step)
                for key in group:
                    clock = self.clocks[key]
                    if captures - schedule.captures(clock.captured) >= clock.interval:
                        capture.add(key)
                        if last_refresh > clock.refreshed:
                            refresh.add(key)
        return FactorsDue(frozenset(capture), frozenset(refresh))
