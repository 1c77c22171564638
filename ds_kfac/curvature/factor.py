"""A side of a layer's matrix, and its factor: the running second moment of that side's rows.

Every factor is block-diagonal. All blocks of a factor have one width (the last block may be
smaller): the full side (dense), a part of it (blocked), 1 (diagonal) or 0 (identity: nothing is
stored). The lower triangles of the blocks follow each other in one flat fp32 tensor.

With adaptive intervals a factor also keeps its last two values, which show how much it changes. A
factor that barely changes is updated and refreshed less often.

Shape suffixes: N rows, D is the side's width, P is its number of packed elements, and n is a number
of blocks of width b.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_kfac.ops.dispatch import (
    block_syrk_accumulate_,
    ema_update_,
    symmetric_unpack_from,
    syrk_accumulate_,
)


@dataclass(frozen=True)
class Side:
    """Width and block structure of one side of a layer's matrix.

    Attributes:
        dim: width D.
        block: width of the blocks on the diagonal. The last block may be smaller. ``dim`` means
            that the factor is dense, 1 that it is diagonal, and 0 that it is the identity.
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
        """Return a side whose blocks have nearly equal widths of at most ``longest``."""
        return cls(dim, -(-dim // -(-dim // longest)))

    def repeated(self, times: int) -> "Side":
        """Return a side that repeats this one ``times`` times, as in a layer with groups. No block
        spans two repetitions."""
        if times == 1:
            return self
        block = self.block
        # a smaller last block would shift the blocks of the next repetition
        while block and self.dim % block:
            block -= 1
        return Side(self.dim * times, block)

    @property
    def kind(self) -> str:
        """Name of the structure in reports: dense, blocks of b, diagonal, identity."""
        if self.block == 0:
            return "identity"
        if self.block == self.dim:
            return "dense"
        return "diagonal" if self.block == 1 else f"blocks of {self.block}"

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Pairs (number of blocks n, width b): one pair for the full blocks, and, if the last block
        is smaller, a second pair for it."""
        if self.block == 0:
            return ()
        full, rest = divmod(self.dim, self.block)
        return ((full, self.block), (1, rest)) if rest else ((full, self.block),)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of packed elements for each entry of :attr:`groups`."""
        return [count * width * (width + 1) // 2 for count, width in self.groups]

    @cached_property
    def numel(self) -> int:
        """Number of packed elements, P."""
        return sum(self.sizes)

    @property
    def basis_numel(self) -> int:
        """Number of elements of the eigenvectors, which is also the number of multiplications to
        rotate one vector. 0 for a diagonal or an identity."""
        return sum(count * width**2 for count, width in self.groups) if self.block > 1 else 0

    def accumulate_(
        self,
        sum_P: Tensor,
        x_ND: Tensor,
        *,
        kept: Tensor | None = None,
        bias: bool = False,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Add ``scale`` times the blocks of x^T x to a packed fp32 sum.

        Args:
            x_ND: rows [N, D]; with ``bias`` [N, D - 1], or [N, D - n] for a side repeated n times.
            kept: bool [N], whether each row is added; None: all rows are added. Rows that are not
                added may hold anything, even NaN.
            bias: whether a 1 is appended to each row as the input of the bias. For a side repeated
                n times, a 1 is appended to each of the n parts of a row.
        """
        if self.block == 0:
            return sum_P
        if self.block == self.dim:
            return syrk_accumulate_(sum_P, x_ND, kept=kept, bias=bias, scale=scale)
        if bias:
            parts = x_ND.unflatten(1, (self.dim - x_ND.shape[1], -1))
            x_ND = F.pad(parts, (0, 1), value=1.0).flatten(1)
        columns = x_ND.split([count * width for count, width in self.groups], dim=1)
        for (_, width), part_P, part_ND in zip(
            self.groups, sum_P.split(self.sizes), columns, strict=True
        ):
            block_syrk_accumulate_(part_P, part_ND, block=width, kept=kept, scale=scale)
        return sum_P

    def blocks(self, packed_P: Tensor) -> tuple[Tensor, ...]:
        """Return the symmetric blocks, [n, b, b] for each entry of :attr:`groups`."""
        return tuple(self.group(packed_P, index) for index in range(len(self.groups)))

    def group(self, packed_P: Tensor, index: int) -> Tensor:
        """Return the symmetric blocks [n, b, b] of one entry of :attr:`groups`."""
        start = sum(self.sizes[:index])
        count, width = self.groups[index]
        if width == 1:
            return packed_P[start : start + count].view(count, 1, 1)
        numel = self.sizes[index]
        starts = range(start, start + numel, numel // count)
        matrices = symmetric_unpack_from(packed_P, starts, [width] * count)
        return torch.stack(matrices) if count > 1 else matrices[0].unsqueeze(0)

    def diagonal_of(self, packed_P: Tensor) -> Tensor:
        """Return the diagonal [D]; an empty tensor for an identity."""
        if not self.groups:
            return packed_P[:0]
        diagonals = [
            part.view(count, -1).index_select(1, _diagonal(width, part.device)).view(-1)
            for (count, width), part in zip(self.groups, packed_P.split(self.sizes), strict=True)
        ]
        return diagonals[0] if len(diagonals) == 1 else torch.cat(diagonals)


@cache
def _diagonal(width: int, device: torch.device) -> Tensor:
    """Return the indices of the diagonal elements in a packed lower triangle."""
    return torch.arange(1, width + 1, device=device).cumsum(0) - 1


SPIKE = 10.0
"""Largest ratio of a batch's trace to the trace of the running average. A batch with a larger ratio
is scaled down to this ratio. In ordinary training the ratio is at most 7, once the average consists
of :data:`SETTLED` batches."""
SETTLED = 10
"""Number of batches that an average must contain before batches are compared with it."""
PIECE = 1 << 18
"""Largest number of elements in one call of torch's norm. With this number of elements, the sum of
squares in fp32 has a relative error of 2e-6."""


@dataclass(frozen=True)
class History:
    """A factor's two most recent values. The next value is compared with them. The tensors change
    in place.

    Attributes:
        last: fp32 [P], the most recent value, on the device of the factor's average. Zero until the
            factor has a value.
        before: fp32 [P], the value before ``last``. Zero until the factor has had two values.
    """

    side: Side
    last: Tensor
    before: Tensor

    @classmethod
    def of(cls, side: Side, last: Tensor | None = None, before: Tensor | None = None) -> "History":
        """Return a history with copies of these values."""

        def copied(value: Tensor | None) -> Tensor:
            if value is None:
                return torch.zeros(side.numel, device="cpu", dtype=torch.float32)
            return value.clone()

        return cls(side, copied(last), copied(before))

    def to(self, device: torch.device) -> "History":
        """Return the history with its values on another device, see :func:`moved`."""
        return replace(self, last=moved(self.last, device), before=moved(self.before, device))


@dataclass(frozen=True)
class KroneckerFactor:
    """One Kronecker factor, A or G. It keeps its tensors for the whole run: :func:`update_` changes
    them in place.

    Attributes:
        side: the factor's width and blocks.
        packed_P: fp32 [P], the running average, on the device, or in CPU memory if factors are
            offloaded.
        updates: fp32 scalar on the device, number of averaged batches. It is a tensor, because only
            the device knows whether a batch had rows.
        history: the factor's last two values; None without adaptive intervals.
    """

    side: Side
    packed_P: Tensor
    updates: Tensor
    history: History | None = None

    @classmethod
    def empty(cls, side: Side, device: torch.device | str = "cpu") -> "KroneckerFactor":
        """Return a factor that has no batch yet. It starts at zero, because an initial identity
        would take hundreds of updates to fade."""
        return cls(
            side,
            torch.zeros(side.numel, device=device, dtype=torch.float32),
            torch.zeros((), device=device, dtype=torch.float32),
        )

    def to(self, device: torch.device) -> "KroneckerFactor":
        """Return the factor with its average on another device. ``updates`` is still the same
        tensor, on the computing device."""
        return replace(self, packed_P=moved(self.packed_P, device))


def usable(factors: Sequence[KroneckerFactor]) -> Tensor:
    """Check for each factor whether it can be decomposed. Returns bool [n].

    A factor cannot be decomposed if it has no data, is zero, or is not finite. G is zero as long as
    the layers above pass no gradient. A factor of zero has no damped inverse, because relative
    damping would also be zero.

    Args:
        factors: at least one.
    """
    largest = torch.stack(
        torch._foreach_norm([factor.packed_P for factor in factors], float("inf"))
    )
    has_data = torch.stack([factor.updates for factor in factors]) > 0
    return has_data & (largest > 0) & torch.isfinite(largest)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``, without waiting for the copy. From a GPU it is copied to
    pinned host memory."""
    if tensor.device.type == device.type or device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def update_(
    factors: Sequence[KroneckerFactor],
    sums_P: Sequence[Tensor],
    counts: Tensor,
    *,
    decays: Sequence[float],
    device: torch.device,
    tolerance: float | None = None,
) -> tuple[dict[int, Tensor], Tensor]:
    """Average a batch into each factor, in place. The batch has already been summed over ranks.
    Each operation is one call for all factors.

    Args:
        sums_P: see :func:`average_`. The tensors are on ``device``.
        counts: see :func:`average_`, on ``device``.
        decays: see :func:`average_`.
        device: the device that computes. If an average is on another device, it is copied to this
            device and back.
        tolerance: see :func:`compare_`. None: no factor is compared with its history.

    Returns two results, both on the device:

    - a dict from the index of a factor with a history to bool [2]: whether the new average is
      similar to the factor's last value, and whether it is similar to the value before that;
    - bool [2, n]: row 0 says whether each factor's batch was scaled down. Row 1 says whether it was
      ignored, because it had no rows or had a value that is not finite.
    """
    if not factors:
        return {}, torch.zeros(2, 0, dtype=torch.bool, device=device)
    here = [factor.to(device) for factor in factors]
    over, used = average_(here, sums_P, counts, decays)
    similar: dict[int, Tensor] = {}
    histories = {
        index: factor.history for index, factor in enumerate(factors) if factor.history is not None
    }
    if tolerance is not None and histories:
        averages = [here[index].packed_P for index in histories]
        flags = compare_([*histories.values()], averages, tolerance=tolerance)
        similar = dict(zip(histories, flags.unbind(), strict=True))
    for factor, computed in zip(factors, here, strict=True):
        if computed.packed_P is not factor.packed_P:
            factor.packed_P.copy_(computed.packed_P, non_blocking=True)
    return similar, torch.stack([(over > 1) & used, ~used])


def average_(
    factors: Sequence[KroneckerFactor],
    sums_P: Sequence[Tensor],
    counts: Tensor,
    decays: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Average a batch into each factor, in place.

        factor <- r factor + (1 - r) sum / count,   r = min(1 - 1/updates, decay)

    The growing r is the bias correction. As long as 1 - 1/updates is below the decay, the average
    is the plain mean of all batches. A batch without rows, or with a value that is not finite, does
    not change its factor. The device checks this, so the host does not wait.

    Note: Spikes. If a gradient is a thousand times too large, its batch would add a million times
    the average to G, and G would need sixty updates to recover. So a batch is scaled down until its
    trace is at most :data:`SPIKE` times the trace of the average. If second moments have really
    grown so much, the average still follows. Each update multiplies the trace of the average by 1 +
    (1 - r) (SPIKE - 1).

    Args:
        factors: at least one.
        sums_P: fp32 [P] for each factor, packed sums of outer products over the global batch.
        counts: fp32 [n], the number of rows in each sum.
        decays: for each factor, the largest weight that the old average may get, in [0, 1).

    Returns two tensors: fp32 [n], the number by which each batch was divided to scale it down,
    usually 1; and bool [n], whether each batch was used.
    """
    averages_P = [factor.packed_P for factor in factors]
    updates = [factor.updates for factor in factors]
    diagonals = [
        factor.side.diagonal_of(x_P)
        for packed_P in (averages_P, sums_P)
        for factor, x_P in zip(factors, packed_P, strict=True)
    ]
    # the trace is the 1-norm of the diagonal, because second moments are not negative
    usual, traces = torch.stack(torch._foreach_norm(diagonals, 1)).chunk(2)
    over = excess(torch.where(counts > 0, traces / counts, 0.0), usual, torch.stack(updates))
    # a larger count scales the batch down
    return over, ema_update_(averages_P, sums_P, (counts * over).unbind(), updates, decays)


def excess(new: Tensor, usual: Tensor, updates: Tensor) -> Tensor:
    """Return a batch's size / (:data:`SPIKE` * usual size), or 1 if that is smaller.

    The result is also 1 if the size is NaN, or if the average is zero or has fewer than
    :data:`SETTLED` batches. The result is infinite if the size or the result itself is larger than
    fp32 can hold. The batch then has no weight.

    Args:
        new: fp32 [..], size of the batch. It is infinite if the batch has infinite values, or if
            the sum of finite values exceeds fp32.
        usual: fp32 [..], size of the running average.
        updates: fp32 [..], number of batches in the average.
    """
    over = new / (SPIKE * usual)
    comparable = (updates >= SETTLED) & (usual > 0) & ~torch.isnan(over)
    return torch.where(comparable, over.clamp(min=1), torch.ones_like(over))


def compare_(
    histories: Sequence[History], packed_P: Sequence[Tensor], *, tolerance: float
) -> Tensor:
    """Compare new values of n factors with their histories. Then store the new values in the
    histories as ``last``, and the old ``last`` as ``before``. Does not wait for the device.

    A value is similar to an old one if |new - old|_F < tolerance |old|_F. It is not similar if
    there is no old value, if the old value is zero, or if either value is not finite. The
    comparison needs memory for one more copy of the values.

    Args:
        packed_P: fp32 [P] for each factor, on the device that computes.

    Returns bool [n, 2]: whether each new value is similar to the last value, and whether it is
    similar to the value before that.

    Source: Osawa et al. 2020 (arXiv:2002.06015), sec. 5.4.
    """
    sides = [history.side for history in histories]
    here = [history.to(packed.device) for history, packed in zip(histories, packed_P, strict=True)]
    last = [history.last for history in here]
    before = [history.before for history in here]
    similar = [_similar(packed_P, old, sides, tolerance) for old in (last, before)]
    torch._foreach_copy_([history.before for history in histories], last, non_blocking=True)
    torch._foreach_copy_([history.last for history in histories], list(packed_P), non_blocking=True)
    return torch.stack(similar, dim=1)


def _similar(
    new_P: Sequence[Tensor], old_P: Sequence[Tensor], sides: Sequence[Side], tolerance: float
) -> Tensor:
    """Return bool [n], whether each new value is similar to the old one, see :func:`compare_`."""
    changes = frobenius(torch._foreach_sub(list(new_P), list(old_P)), sides)
    norms = frobenius(old_P, sides)
    return (changes < tolerance * norms) & norms.isfinite()


def frobenius(packed_P: Sequence[Tensor], sides: Sequence[Side]) -> Tensor:
    """Return the Frobenius norms of packed symmetric matrices, fp32 [n]. A packed element off the
    diagonal counts twice."""
    diagonals = [side.diagonal_of(packed) for side, packed in zip(sides, packed_P, strict=True)]
    return (2 * _squares(packed_P) - _squares(diagonals)).sqrt()


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, fp32 [n]. It is computed from the norms of pieces,
    because torch's norm over millions of elements loses digits on a CPU."""
    pieces_of = [tensor.split(PIECE) for tensor in tensors]
    norms = torch._foreach_norm([piece for pieces in pieces_of for piece in pieces])
    squares = torch.stack(norms).square().split([len(pieces) for pieces in pieces_of])
    return torch.stack([of_tensor.sum() for of_tensor in squares])
