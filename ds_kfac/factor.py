"""A side of a layer: the running second moment of its rows, kept as a packed fp32 triangle.

Shape suffixes: D the side's width, P = D(D+1)/2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.ops.functional import packed_numel, symmetric_unpack


@dataclass(frozen=True)
class KroneckerFactor:
    """One Kronecker factor, A or G. Never changed in place, so that a skipped step only has to drop the new one.

    Attributes:
        dim: the side D.
        packed_P: fp32 [P], lower triangle of the running average.
        updates: fp32 scalar on the device, batches folded in so far. A tensor, because whether a batch carried
            any rows is known on the device only.
    """

    dim: int
    packed_P: Tensor
    updates: Tensor

    @classmethod
    def empty(cls, dim: int, device: torch.device | str = "cpu") -> "KroneckerFactor":
        """A factor that has seen nothing; no identity start, it would take hundreds of updates to fade."""
        return cls(dim, torch.zeros(packed_numel(dim), device=device), torch.zeros((), device=device))

    def averaged(self, sum_P: Tensor, count: Tensor, *, decay: float) -> "KroneckerFactor":
        """Fold in one batch: factor <- r factor + (1 - r) sum / count, with r = min(1 - 1/updates, decay).

        The growing r is the bias correction: until the window is full this is the plain mean of all batches.
        A batch without rows, or with a value that is not finite, leaves the factor as it is; decided on the
        device, without a host synchronisation.

        Args:
            sum_P: fp32 [P], packed sum of outer products over the global batch.
            count: fp32 scalar, number of summands.
            decay: weight of the past in [0, 1).
        """
        usable = (count > 0) & torch.isfinite(sum_P).all()
        updates = self.updates + usable.to(self.updates.dtype)
        keep = torch.clamp(1 - 1 / updates.clamp(min=1), max=decay)
        averaged = keep * self.packed_P + (1 - keep) * (sum_P / count.clamp(min=1))
        return KroneckerFactor(self.dim, torch.where(usable, averaged, self.packed_P), updates)

    def dense(self) -> Tensor:
        """The symmetric matrix, fp32 [D, D]."""
        return symmetric_unpack(self.packed_P, dim=self.dim)

    @property
    def nbytes(self) -> int:
        return self.packed_P.nbytes + self.updates.nbytes
