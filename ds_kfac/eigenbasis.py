"""Eigenbases of a side and of a layer, and what to do when a decomposition fails.

Shape suffixes: D a side's width, O and I the sides of a layer's matrix, n blocks of width b.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.factor import KroneckerFactor


@dataclass(frozen=True)
class Eigenbasis:
    """factor = Q diag(values) Q^T with an orthogonal, block-diagonal Q.

    Attributes:
        vectors: fp32 [n, b, b] per group of equal blocks, eigenvectors in columns; empty if Q is the identity, as it
            is for a diagonal factor.
        values: fp32 [D], ascending in each block, clamped at 0 (a second moment has no negative ones but for rounding).
    """

    vectors: tuple[Tensor, ...]
    values: Tensor

    @property
    def nbytes(self) -> int:
        return sum(vectors.nbytes for vectors in self.vectors) + self.values.nbytes

    def rotate(self, x_D: Tensor) -> Tensor:
        """Q^T x for x [D, any]."""
        return self._apply(x_D, [vectors.mT for vectors in self.vectors])

    def restore(self, x_D: Tensor) -> Tensor:
        """Q x for x [D, any]; undoes :meth:`rotate`."""
        return self._apply(x_D, list(self.vectors))

    @staticmethod
    def _apply(x_D: Tensor, matrices: list[Tensor]) -> Tensor:
        pieces, start = [], 0
        for matrix in matrices:
            count, width, _ = matrix.shape
            part = x_D[start : start + count * width]
            start += count * width
            # a batch of one is slower as a batch
            product = matrix[0] @ part if count == 1 else (matrix @ part.reshape(count, width, -1)).flatten(0, 1)
            pieces.append(product)
        if not pieces:
            return x_D
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def overlap(self, old: "Eigenbasis | None") -> "Eigenbasis":
        """The basis whose ``rotate`` takes coordinates in ``old`` (None: unrotated) to coordinates in this one."""
        if old is None or not self.vectors:
            return self
        return Eigenbasis(
            tuple(before.mT @ now for before, now in zip(old.vectors, self.vectors, strict=True)), self.values
        )

    def squared(self) -> "Eigenbasis":
        """Every entry of Q squared: how a diagonal of second moments is carried over, see ``moments.py``."""
        return Eigenbasis(tuple(vectors.square() for vectors in self.vectors), self.values)


@dataclass(frozen=True)
class LayerBasis:
    """The eigenbasis of a layer's Fisher, G kron A: rows by G, columns by A."""

    G: Eigenbasis
    A: Eigenbasis

    @property
    def nbytes(self) -> int:
        return self.G.nbytes + self.A.nbytes

    def rotate(self, x_OI: Tensor) -> Tensor:
        """Q_G^T x Q_A."""
        return self.A.rotate(self.G.rotate(x_OI).T).T

    def restore(self, x_OI: Tensor) -> Tensor:
        """Q_G x Q_A^T."""
        return self.A.restore(self.G.restore(x_OI).T).T

    def overlap(self, old: "LayerBasis | None") -> "LayerBasis":
        """See :meth:`Eigenbasis.overlap`."""
        return LayerBasis(self.G.overlap(old.G if old else None), self.A.overlap(old.A if old else None))

    def squared(self) -> "LayerBasis":
        return LayerBasis(self.G.squared(), self.A.squared())


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Exact decomposition of [n, b, b] in its own dtype and place; (values, vectors) in fp32."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.float().clamp(min=0), vectors.float().contiguous()


EIGEN_METHODS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"eigh": eigh}


def refresh(factor: KroneckerFactor, *, method: str = "eigh") -> tuple[Eigenbasis | None, int]:
    """Decompose a usable factor.

    Returns the basis, or None when every rung of the ladder failed for some block, and the number of rungs that
    failed. Synchronises with the device, as every decomposition does; called on refresh steps only.
    """
    side, failures = factor.side, 0
    if side.block == 0:
        return Eigenbasis((), factor.packed_P.new_ones(side.dim)), 0
    if side.block == 1:
        return Eigenbasis((), factor.packed_P.clamp(min=0)), 0
    values, vectors = [], []
    for blocks in side.blocks(factor.packed_P):
        decomposed, failed = _climb(blocks, EIGEN_METHODS[method])
        failures += failed
        if decomposed is None:
            return None, failures
        values.append(decomposed[0].reshape(-1))
        vectors.append(decomposed[1])
    return Eigenbasis(tuple(vectors), torch.cat(values)), failures


def _climb(
    blocks: Tensor, decompose: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """The ladder on failure: as given, in float64, in float64 on the CPU.

    The input is checked by the caller (LAPACK returns NaN for NaN without a word, cuSOLVER raises).
    """
    rungs = [blocks, blocks.double()]
    if blocks.device.type != "cpu":
        rungs.append(blocks.double().cpu())
    for failures, matrix in enumerate(rungs):
        try:
            values, vectors = decompose(matrix)
        except RuntimeError:  # LinAlgError, or cuSOLVER's own; the next rung is more exact, then elsewhere
            continue
        if bool(torch.isfinite(vectors).all() & torch.isfinite(values).all()):
            return (values.to(blocks.device), vectors.to(blocks.device)), failures
    return None, len(rungs)
