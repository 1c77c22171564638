"""SP-NGD's adaptive rule: a factor that barely changes is captured and refreshed less often.

Shape suffixes: P packed elements of a factor.

Source: Osawa et al. 2020 (arXiv:2002.06015), sec. 5.4.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.factor import moved
from ds_kfac.side import Side


@dataclass(frozen=True)
class AdaptiveRule:
    """How an interval follows a factor's change; intervals in units of the ordinary one.

    Attributes:
        tolerance: two factors are similar if |P - Q|_F / |Q|_F is below it.
        max_interval: where growth ends; None never.
    """

    tolerance: float = 0.1
    max_interval: int | None = None

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
        grown = interval + previous
        return (grown if self.max_interval is None else max(interval, min(grown, self.max_interval))), interval


@dataclass(frozen=True)
class History:
    """A factor as it was at its last two refreshes; what a new one is compared with.

    Attributes:
        last, before: fp32 [P]; None until there were so many refreshes.
    """

    side: Side
    last: Tensor | None = None
    before: Tensor | None = None

    def pushed(self, packed_P: Tensor) -> "History":
        """After a refresh from ``packed_P``, which is kept, not copied."""
        return replace(self, last=packed_P, before=self.last)

    def compared(self, packed_P: Tensor, *, tolerance: float) -> Tensor:
        """Bool [2] on the device, without waiting for it: similar to the last, similar to the one before.

        False where there is none, where it is zero, and where a value is not finite.
        """
        none = torch.zeros((), dtype=torch.bool, device=packed_P.device)
        return torch.stack(
            [none if old is None else self._similar(packed_P, old, tolerance) for old in (self.last, self.before)]
        )

    def _similar(self, new_P: Tensor, old_P: Tensor, tolerance: float) -> Tensor:
        return self.side.frobenius(new_P - old_P) < tolerance * self.side.frobenius(old_P)

    def to(self, device: torch.device) -> "History":
        """On another device; pinned if that is the host of a GPU."""
        last, before = (None if kept is None else moved(kept, device) for kept in (self.last, self.before))
        return replace(self, last=last, before=before)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.last, self.before) if kept is not None)
