"""A side of a layer's matrix, and the running second moment of its rows, the factor.

Every kind of side is a block-diagonal matrix with blocks of one size: the side itself (dense), a part of it (blocked),
1 (diagonal) or 0 (identity: nothing is kept). The lower triangles of the blocks follow each other in one flat fp32
tensor.

Shape suffixes: N rows, D the side's width, P its packed elements, n blocks of width b.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ds_kfac.ops.dispatch import block_syrk_accumulate_, ema_update_, symmetric_unpack_from, syrk_accumulate_


@dataclass(frozen=True)
class Side:
    """One side; plain values.

    Attributes:
        dim: width D.
        block: width of the diagonal blocks; ``dim`` is dense, 1 diagonal, 0 identity. The last block is smaller where
            ``dim`` is no multiple.
    """

    dim: int
    block: int

    @classmethod
    def dense(cls, dim: int) -> "Side":
        return cls(dim, dim)

    @classmethod
    def diagonal(cls, dim: int) -> "Side":
        return cls(dim, 1)

    @classmethod
    def identity(cls, dim: int) -> "Side":
        return cls(dim, 0)

    @classmethod
    def blocks_of(cls, dim: int, longest: int) -> "Side":
        """Blocks as even as possible, at most so long."""
        return cls(dim, -(-dim // -(-dim // longest)))

    def repeated(self, times: int) -> "Side":
        """So many of this side after each other, every one with its own blocks."""
        if times == 1:
            return self
        block = self.block
        while block and self.dim % block:  # a smaller last block would shift those of the next one
            block -= 1
        return Side(self.dim * times, block)

    @property
    def kind(self) -> str:
        """For people: dense, blocks of b, diagonal, identity."""
        if self.block == 0:
            return "identity"
        if self.block == self.dim:
            return "dense"
        return "diagonal" if self.block == 1 else f"blocks of {self.block}"

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(n, b): the full blocks, then the rest."""
        if self.block == 0:
            return ()
        full, rest = divmod(self.dim, self.block)
        return ((full, self.block), (1, rest)) if rest else ((full, self.block),)

    @cached_property
    def sizes(self) -> list[int]:
        """Packed elements of each entry of :attr:`groups`."""
        return [count * width * (width + 1) // 2 for count, width in self.groups]

    @cached_property
    def numel(self) -> int:
        """Packed elements P."""
        return sum(self.sizes)

    @property
    def basis_numel(self) -> int:
        """Elements of its eigenvectors, which is multiplications to rotate one vector; a diagonal has none."""
        return sum(count * width**2 for count, width in self.groups) if self.block > 1 else 0

    def accumulate_(
        self, sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None, scale: Tensor | float = 1.0
    ) -> Tensor:
        """Add ``scale`` times the rows' second moment, inside the blocks, to a packed fp32 sum.

        Args:
            x_ND: rows [N, D], or [N, D - 1] with ``ones_column``, [N, D - n] of a side that is n repeated.
            ones_column: [N, 1] of 1 (0 for a row that does not count), the input of the bias.
        """
        if self.block == 0:
            return sum_P
        if self.block == self.dim:
            return syrk_accumulate_(sum_P, x_ND, ones_column=ones_column, scale=scale)
        if ones_column is not None:
            parts = x_ND.unflatten(1, (self.dim - x_ND.shape[1], -1))
            ones = ones_column.to(x_ND.dtype).unsqueeze(1).expand(*parts.shape[:2], 1)
            x_ND = torch.cat([parts, ones], dim=2).flatten(1)
        columns = x_ND.split([count * width for count, width in self.groups], dim=1)
        for (_, width), part_P, part_ND in zip(self.groups, sum_P.split(self.sizes), columns, strict=True):
            block_syrk_accumulate_(part_P, part_ND, block=width, scale=scale)
        return sum_P

    def blocks(self, packed_P: Tensor) -> tuple[Tensor, ...]:
        """The symmetric blocks, [n, b, b] per entry of :attr:`groups`."""
        return tuple(self.group(packed_P, index) for index in range(len(self.groups)))

    def group(self, packed_P: Tensor, index: int) -> Tensor:
        """The symmetric blocks [n, b, b] of one entry of :attr:`groups`."""
        start, (count, width) = sum(self.sizes[:index]), self.groups[index]
        if width == 1:
            return packed_P[start : start + count].view(count, 1, 1)
        numel = self.sizes[index]
        starts = range(start, start + numel, numel // count)
        matrices = symmetric_unpack_from(packed_P, starts, [width] * count)
        return torch.stack(matrices) if count > 1 else matrices[0].unsqueeze(0)

    def trace(self, packed_P: Tensor) -> Tensor:
        """Trace of the side's matrix, a scalar."""
        return self.diagonal_of(packed_P).sum() if self.block else packed_P.new_tensor(float(self.dim))

    def diagonal_of(self, packed_P: Tensor) -> Tensor:
        """[D] of the blocks; empty for an identity."""
        diagonals = [packed_P[:0]]
        for (count, width), part in zip(self.groups, packed_P.split(self.sizes), strict=True):
            index = torch.arange(1, width + 1, device=packed_P.device).cumsum(0) - 1
            diagonals.append(part.view(count, -1)[:, index].reshape(-1))
        return torch.cat(diagonals)


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
