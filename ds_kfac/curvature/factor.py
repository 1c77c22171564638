"""The running second moment of one side's rows, kept as packed fp32 triangles.

Shape suffixes: D the side's width, P its packed elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.curvature.side import Side
from ds_kfac.ops.dispatch import ema_update_

SPIKE = 10.0
"""A batch's trace over that of the running average, above which it is scaled down to it. From one batch to the next it
changes by 7 at most in ordinary training, once the average stands on :data:`SETTLED` batches."""
SETTLED = 10


@dataclass(frozen=True)
class KroneckerFactor:
    """One Kronecker factor, A or G. Never changed in place, so that a skipped step only has to drop the new one.

    Attributes:
        side: width and structure.
        packed_P: fp32 [P], the running average.
        updates: fp32 scalar on the device, batches folded in so far. A tensor, because whether a batch carried
            any rows is known on the device only.
    """

    side: Side
    packed_P: Tensor
    updates: Tensor

    @classmethod
    def empty(cls, side: Side, device: torch.device | str = "cpu") -> "KroneckerFactor":
        """A factor that has seen nothing; no identity start, it would take hundreds of updates to fade."""
        return cls(side, torch.zeros(side.numel, device=device), torch.zeros((), device=device))

    def usable(self) -> Tensor:
        """Bool scalar: whether a decomposition makes sense. An identity always is, zero and no data are not.

        G is zero as long as everything above a layer is, as with a zero-initialised output projection; relative
        damping would then be zero too.
        """
        if self.side.block == 0:
            return torch.ones((), dtype=torch.bool, device=self.packed_P.device)
        return (self.updates > 0) & torch.isfinite(self.packed_P).all() & (self.packed_P != 0).any()

    def to(self, device: torch.device) -> "KroneckerFactor":
        """With its average on another device; the counter stays where it is: every step asks for it."""
        return replace(self, packed_P=moved(self.packed_P, device))

    @property
    def nbytes(self) -> int:
        return self.packed_P.nbytes + self.updates.nbytes


def averaged(
    factors: Sequence[KroneckerFactor], sums_P: Sequence[Tensor], counts: Sequence[Tensor], decays: Sequence[float]
) -> tuple[list[KroneckerFactor], Tensor]:
    """Fold a batch into each: factor <- r factor + (1 - r) sum / count, with r = min(1 - 1/updates, decay).

    The growing r is the bias correction: until the window is full this is the plain mean of all batches.
    A batch without rows, or with a value that is not finite, leaves its factor as it is; decided on the
    device, without a host synchronisation.

    One gradient a thousand times too large would be a million times the average in G, and stay in it for sixty updates.
    So a batch counts for at most :data:`SPIKE` times the average's trace. A factor that has really grown so much is
    followed all the same, by 1 + (1 - r) (SPIKE - 1) an update.

    Args:
        sums_P: fp32 [P], packed sums of outer products over the global batch.
        counts: fp32 scalars, numbers of summands.
        decays: weight of the past in [0, 1).

    Returns also by how much each batch was scaled down, fp32 [n], 1 for most.
    """
    if not factors:
        return [], torch.ones(0)
    numbers = torch.stack(list(counts))
    over = _excess(factors, sums_P, numbers)
    counts = (numbers * over).unbind()
    packed = [factor.packed_P.clone() for factor in factors]
    updates = [factor.updates.clone() for factor in factors]
    ema_update_(packed, sums_P, counts, updates, decays)
    new = [
        replace(factor, packed_P=packed_P, updates=number)
        for factor, packed_P, number in zip(factors, packed, updates, strict=True)
    ]
    return new, over


def _excess(factors: Sequence[KroneckerFactor], sums_P: Sequence[Tensor], counts_n: Tensor) -> Tensor:
    """By how much each batch's trace is over what it may be, [n], at least 1: dividing by so many more summands scales
    it. A batch without rows, or one that is not to count, is over nothing."""
    usual = torch.stack([factor.side.trace(factor.packed_P) for factor in factors])
    traces = torch.stack([factor.side.trace(sum_P) for factor, sum_P in zip(factors, sums_P, strict=True)])
    means = torch.where(counts_n > 0, traces / counts_n.clamp(min=1), 0)
    return excess(means, usual, torch.stack([factor.updates for factor in factors]))


def excess(new: Tensor, usual: Tensor, updates: Tensor) -> Tensor:
    """By how much sizes are over what a batch may count for, [..], at least 1; what is not finite is over nothing.

    Args:
        usual: size of the running average, which stands on so many ``updates``.
    """
    over = new / (SPIKE * usual)
    known = (updates >= SETTLED) & (usual > 0) & torch.isfinite(over)
    return torch.where(known, over.clamp(min=1), torch.ones_like(over))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On ``device``; coming from a GPU to the host in pinned memory, without waiting."""
    if tensor.device.type == device.type or device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
