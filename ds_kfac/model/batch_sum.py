"""The sums over a batch's rows that become factors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class BatchSum:
    """A sum over rows, added to in place. It takes memory from the first rows on.

    Args:
        sum_P: fp32, packed sum of outer products.
        count: fp32 scalar: of A its rows (uses of the layer times loss terms), of G loss terms.
    """

    def __init__(self, sum_P: Tensor | None = None, count: Tensor | None = None) -> None:
        self._sum_P, self._count = sum_P, count
        if sum_P is not None:
            self.numel, self.device = sum_P.numel(), sum_P.device

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> "BatchSum":
        """Without rows; the packed sum has ``numel`` elements."""
        made = cls()
        made.numel, made.device = numel, device
        return made

    def like(self) -> "BatchSum":
        """An empty one of the same size."""
        return BatchSum.empty(self.numel, self.device)

    @property
    def sum_P(self) -> Tensor:
        if self._sum_P is None:
            self._sum_P = torch.zeros(self.numel, device=self.device)
        return self._sum_P

    @property
    def count(self) -> Tensor:
        if self._count is None:
            self._count = torch.zeros((), device=self.device)
        return self._count

    def take(self, other: "BatchSum") -> None:
        """Add ``other``, which must not be used afterwards: its memory may be this one's then."""
        if self._sum_P is None and self._count is None:
            self._sum_P, self._count = other._sum_P, other._count
        else:
            self.sum_P.add_(other.sum_P)
            self.count.add_(other.count)

    def clear(self) -> None:
        """No rows, and no memory."""
        self._sum_P = self._count = None


@dataclass(frozen=True)
class UseSums:
    """Where the rows of one use of a layer go, this step; None where nothing is due here."""

    A: BatchSum | None
    G: BatchSum | None

    def having(self, side: str, sum_: BatchSum | None) -> "UseSums":
        return replace(self, **{side: sum_})

    @property
    def sides(self) -> str:
        """Those that are due: "AG", "A", "G" or ""."""
        return "".join(side for side in "AG" if getattr(self, side) is not None)


class Sums(Protocol):
    """Keeps a step's batch sums."""

    def allocate(self, keys: frozenset[str], step: int) -> Mapping[str, Sequence[UseSums]]:
        """At the first rows of a step: empty sums of those of the factors in ``keys`` that this rank contributes to, by
        layer name, one per use."""
        ...
