"""Which factors are due at a step: the schedule, displaced factor by factor, and thinned out by SP-NGD's adaptive rule
(Osawa et al. 2019, arXiv:1811.12019).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from ds_kfac.schedule.intervals import Schedule


@dataclass(frozen=True)
class AdaptiveRule:
    """How an interval follows a factor's change, SP-NGD's (Osawa et al. 2019, arXiv:1811.12019); in units of the
    ordinary one.

    Attributes:
        tolerance: two factors are similar if |P - Q|_F / |Q|_F is below it.
    """

    tolerance: float = 0.1

    def next_interval(
        self, interval: int, previous: int, similar_to_last: bool, similar_to_before: bool
    ) -> tuple[int, int]:
        """The next (interval, previous): halved after a change, kept after a small one, else 1, 2, 3, 5, 8, ...

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


@dataclass(frozen=True)
class FactorsDue:
    """Factors to fold this step's batch into, and those of them to decompose again."""

    capture: Keys
    refresh: Keys


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

    Attributes:
        captured, skipped: captures of factors that were recorded, and those that the rule left out of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        keys: Sequence[str],
        *,
        offsets: Mapping[str, int] | None = None,
        adaptive: AdaptiveRule | None = None,
    ) -> None:
        """
        Args:
            keys: all factors.
            offsets: steps by which factors are displaced, see :meth:`Schedule.displaced`; 0 for those not in it.
        """
        offsets = offsets or {}
        assert offsets.keys() <= set(keys), f"offsets of unknown factors {sorted(offsets.keys() - set(keys))}"
        groups: dict[int, list[str]] = {}
        for key in keys:
            groups.setdefault(offsets.get(key, 0), []).append(key)
        self._groups = tuple((schedule.displaced(offset), frozenset(group)) for offset, group in groups.items())
        self.keys, self.adaptive = frozenset(keys), adaptive
        self._adaptive_from = schedule.burn_in.steps if schedule.burn_in else 0
        self._patterns: dict[bytes, FactorsDue] = {}
        self._made: WeakValueDictionary[tuple[Keys, Keys], FactorsDue] = WeakValueDictionary()
        self._asked: tuple[int, FactorsDue] | None = None
        self.restore({})

    def due(self, step: int) -> FactorsDue:
        """Factors due at ``step``, the count of applied steps before it. Equal sets are the same object while it lives;
        without adaptive rule it lives on."""
        if self._asked is None or self._asked[0] != step:
            adapts = self.adaptive is not None and step >= self._adaptive_from
            self._asked = step, self._thinned(step) if adapts else self._scheduled(step)
        return self._asked[1]

    def captures_possible(self, step: int) -> bool:
        """Whether any factor's schedule captures at ``step``, whatever the adaptive rule makes of it."""
        return any(schedule.due(step).capture for schedule, _ in self._groups)

    def multiplier(self, key: str) -> int:
        """How many captures of its schedule a factor's next capture stands for; 1 unless adaptive."""
        return self._clocks[key].interval

    def record(self, step: int, due: FactorsDue, similar: Mapping[str, tuple[bool, bool]]) -> None:
        """After an applied step, any: count, and set the next intervals of the factors captured in it.

        Args:
            due: what was done at ``step``; ``due(step)``, or more.
            similar: of each captured factor, whether it is similar to itself at its last refresh before this step, and
                at the one before that; read if adaptive and past the burn-in only.
        """
        self.captured += len(due.capture)
        self.skipped += len(self._scheduled(step).capture - due.capture)
        if self.adaptive is None:
            return
        for key in due.capture:
            clock = replace(self._clocks[key], captured=step)
            if step >= self._adaptive_from:
                interval, previous = self.adaptive.next_interval(clock.interval, clock.previous, *similar[key])
                clock = replace(clock, interval=interval, previous=previous)
            self._clocks[key] = clock
        for key in due.refresh:
            self._clocks[key] = replace(self._clocks[key], refreshed=step)
        self._asked = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint; plain numbers, strings, lists and dicts."""
        clocks = self._clocks.items() if self.adaptive else ()
        factors = {key: [clock.interval, clock.previous, clock.captured, clock.refreshed] for key, clock in clocks}
        return {"captured": self.captured, "skipped": self.skipped, "factors": factors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. Factors that are not in it start afresh: all intervals 1, refreshed at the next
        capture; those of another model are ignored."""
        self._clocks = dict.fromkeys(self.keys, _Clock())
        self._asked = None
        self.captured, self.skipped = state.get("captured", 0), state.get("skipped", 0)
        if self.adaptive is not None:
            known = {key: _Clock(*numbers) for key, numbers in state.get("factors", {}).items() if key in self.keys}
            self._clocks |= known

    def _scheduled(self, step: int) -> FactorsDue:
        dues = [schedule.due(step) for schedule, _ in self._groups]
        pattern = bytes(due.capture + due.refresh for due in dues)
        if pattern not in self._patterns:
            pairs = [(due, group) for due, (_, group) in zip(dues, self._groups, strict=True)]
            capture = frozenset(key for due, group in pairs if due.capture for key in group)
            refresh = frozenset(key for due, group in pairs if due.refresh for key in group)
            self._patterns[pattern] = self._shared(capture, refresh)
        return self._patterns[pattern]

    def _thinned(self, step: int) -> FactorsDue:
        capture, refresh = set(), set()
        for schedule, group in self._groups:
            if not schedule.due(step).capture:
                continue
            captures, last_refresh = schedule.captures(step), schedule.last_refresh(step)
            for key in group:
                clock = self._clocks[key]
                if captures - schedule.captures(clock.captured) >= clock.interval:
                    capture.add(key)
                    if last_refresh > clock.refreshed:
                        refresh.add(key)
        return self._shared(frozenset(capture), frozenset(refresh))

    def _shared(self, capture: Keys, refresh: Keys) -> FactorsDue:
        return self._made.setdefault((capture, refresh), FactorsDue(capture, refresh))
