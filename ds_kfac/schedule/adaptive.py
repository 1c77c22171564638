"""Intervals that follow how much a factor changes: SP-NGD's rule (Osawa et al. 2019, arXiv:1811.12019)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdaptiveRule:
    """How an interval follows a factor's change; intervals in units of the ordinary one.

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
