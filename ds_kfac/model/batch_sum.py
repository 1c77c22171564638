"""The sums over a batch's rows that become factors."""

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
