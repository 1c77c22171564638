"""SP-NGD's adaptive rule: a factor that barely changes is captured and refreshed less often.

Shape suffixes: P packed elements of a factor.

Source: Osawa et al. 2020 (arXiv:2002.06015), sec. 5.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.factor import moved
from ds_kfac.ops.dispatch import similarity
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
    """A factor as it was when it was last folded into, and before that; what a new one is compared with.

    Attributes:
        last, before: fp32 [P]; None until there were so many.
        norms: fp32 [2], |last|_F and |before|_F, NaN where there is none; stays on the device of the arithmetic. None:
            not known, found when it is next compared.
    """

    side: Side
    last: Tensor | None = None
    before: Tensor | None = None
    norms: Tensor | None = None

    def to(self, device: torch.device) -> "History":
        """The values on another device; pinned if that is the host of a GPU."""
        last, before = (None if kept is None else moved(kept, device) for kept in (self.last, self.before))
        return replace(self, last=last, before=before)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.last, self.before, self.norms) if kept is not None)


def compared(
    histories: Sequence[History], packed_P: Sequence[Tensor], *, tolerance: float
) -> tuple[Tensor, list[History]]:
    """New values of several factors against their histories, in one pass over each, without waiting for the device.

    A value is similar to an old one if |new - old|_F < tolerance |old|_F: never if there is none, if it is zero, or if
    something is not finite.

    Args:
        packed_P: fp32 [P] of each, on one device; kept, not copied.

    Returns bool [n, 2]: similar to the last, similar to the one before; and the histories with the new values.
    """
    old = torch.stack([_norms(history, packed.device) for history, packed in zip(histories, packed_P, strict=True)])
    norms = similarity(
        packed_P,
        [history.last for history in histories],
        [history.before for history in histories],
        *_layout(histories),
    )
    similar = (norms[:, 1:] < tolerance * old) & old.isfinite()
    kept = torch.stack([norms[:, 0], old[:, 0]], dim=1).unbind()
    pushed = [
        replace(history, last=packed, before=history.last, norms=own)
        for history, packed, own in zip(histories, packed_P, kept, strict=True)
    ]
    return similar, pushed


def _norms(history: History, device: torch.device) -> Tensor:
    """Those of the values that it has; found if they are not known, as after loading a checkpoint without them."""
    if history.norms is not None:
        return history.norms.to(device)
    none = torch.full((), float("nan"), device=device)
    values = (history.last, history.before)
    layout = _layout([history])
    return torch.stack([none if x is None else similarity([x], [None], [None], *layout)[0, 0] for x in values])


def _layout(histories: Sequence[History]) -> tuple[list[int], list[int]]:
    return [history.side.dim for history in histories], [history.side.block for history in histories]
