"""A side of a layer's matrix: how its second moment is kept, from a whole matrix down to nothing.

Every kind is a block-diagonal matrix with blocks of one size: the side itself (dense), a part of it (blocked), 1
(diagonal) or 0 (identity: nothing is kept). The lower triangles of the blocks follow each other in one flat tensor.

Shape suffixes: N rows, D the side's width, P its packed elements, n blocks of width b.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.ops.dispatch import block_syrk_accumulate_, symmetric_unpack_from, syrk_accumulate_
from ds_kfac.ops.reference import packed_numel


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

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(n, b): the full blocks, then the rest."""
        if self.block == 0:
            return ()
        full, rest = divmod(self.dim, self.block)
        return ((full, self.block), (1, rest)) if rest else ((full, self.block),)

    @property
    def numel(self) -> int:
        """Packed elements P."""
        return sum(count * packed_numel(width) for count, width in self.groups)

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
        column = start = 0
        for count, width in self.groups:
            stop = start + count * packed_numel(width)
            part = x_ND[:, column : column + count * width]
            block_syrk_accumulate_(sum_P[start:stop], part, block=width, scale=scale)
            column, start = column + count * width, stop
        return sum_P

    def blocks(self, packed_P: Tensor) -> tuple[Tensor, ...]:
        """The symmetric blocks, [n, b, b] per entry of :attr:`groups`."""
        return tuple(self.group(packed_P, index) for index in range(len(self.groups)))

    def group(self, packed_P: Tensor, index: int) -> Tensor:
        """The symmetric blocks [n, b, b] of one entry of :attr:`groups`."""
        start = sum(count * packed_numel(width) for count, width in self.groups[:index])
        count, width = self.groups[index]
        if width == 1:
            return packed_P[start : start + count].view(count, 1, 1)
        numel = packed_numel(width)
        starts = range(start, start + count * numel, numel)
        matrices = symmetric_unpack_from(packed_P, starts, [width] * count)
        return torch.stack(matrices) if count > 1 else matrices[0].unsqueeze(0)

    def trace(self, packed_P: Tensor) -> Tensor:
        """Trace of the side's matrix, a scalar."""
        return self.diagonal_of(packed_P).sum() if self.block else packed_P.new_tensor(float(self.dim))

    def diagonal_of(self, packed_P: Tensor) -> Tensor:
        """[D] of the blocks; empty for an identity."""
        diagonals, start = [packed_P[:0]], 0
        for count, width in self.groups:
            stop = start + count * packed_numel(width)
            index = torch.arange(1, width + 1, device=packed_P.device).cumsum(0) - 1
            diagonals.append(packed_P[start:stop].view(count, -1)[:, index].reshape(-1))
            start = stop
        return torch.cat(diagonals)
