"""Eigenbases of a side and of a layer, and what to do when a decomposition fails.

Shape suffixes: D a side's width, O and I the sides of a layer's matrix, n blocks of width b.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from ds_kfac.factor import KroneckerFactor
from ds_kfac.side import Side
from ds_kfac.warm_start import WarmStart, warmed


def block_product(matrices: Sequence[Tensor], x_D: Tensor) -> Tensor:
    """A block-diagonal matrix times x [D, any].

    Args:
        matrices: [n, b, b] per group of equal blocks; none for the identity.
    """
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


@dataclass(frozen=True)
class Eigenbasis:
    """factor = Q diag(values) Q^T with an orthogonal, block-diagonal Q.

    Attributes:
        vectors: fp32 [n, b, b] per group of equal blocks, eigenvectors in columns; empty if Q is the identity, as it
            is for a diagonal factor.
        values: fp32 [D], clamped at 0 (a second moment has no negative ones but for rounding). From a decomposition
            they ascend in each block; after a warm start, which keeps every vector at its place, they need not.
    """

    vectors: tuple[Tensor, ...]
    values: Tensor

    @property
    def nbytes(self) -> int:
        return sum(vectors.nbytes for vectors in self.vectors) + self.values.nbytes

    def rounded(self, dtype: torch.dtype) -> "Eigenbasis":
        """With vectors as they are after travelling in ``dtype``; itself in fp32."""
        if dtype is torch.float32:
            return self
        return Eigenbasis(tuple(vectors.to(dtype).float() for vectors in self.vectors), self.values)

    def rotate(self, x_D: Tensor) -> Tensor:
        """Q^T x for x [D, any]."""
        return block_product([vectors.mT for vectors in self.vectors], x_D)

    def restore(self, x_D: Tensor) -> Tensor:
        """Q x for x [D, any]; undoes :meth:`rotate`."""
        return block_product(self.vectors, x_D)

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


def basis_numel(side: Side) -> int:
    """Elements of a side's eigenvectors, which is multiplications to rotate one vector; a diagonal has none."""
    return sum(count * width**2 for count, width in side.groups) if side.block > 1 else 0


def flat_vectors(basis: Eigenbasis) -> Tensor:
    """All eigenvectors in one flat tensor."""
    return torch.cat([vectors.reshape(-1) for vectors in basis.vectors])


def basis_from(side: Side, flat: Tensor | None, values: Tensor) -> Eigenbasis:
    """Inverse of :func:`flat_vectors`; fp32, a copy.

    Args:
        flat: in any dtype; None for a side without eigenvectors.
    """
    vectors, start = [], 0
    if flat is not None and side.block > 1:
        for count, width in side.groups:
            numel = count * width**2
            piece = flat[start : start + numel].to(torch.float32, copy=True)
            vectors.append(piece.view(count, width, width))
            start += numel
    return Eigenbasis(tuple(vectors), values)


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


T = TypeVar("T")


@dataclass(frozen=True)
class Refreshed(Generic[T]):
    """What a refresh came to.

    Attributes:
        basis: an eigenbasis, or a damped inverse (``inverse.py``); None when every rung of the ladder failed for some
            block.
        how: "kept" (``basis`` is the previous one), "values" (new values, the very same vectors), "qr" or "eigh" (new
            vectors), "cholesky" (a new inverse), "diagonal" (of a diagonal or identity side, nothing to decompose),
            "failed".
        retries: rungs of the ladder that failed.
    """

    basis: T | None
    how: Literal["kept", "values", "qr", "eigh", "cholesky", "diagonal", "failed"]
    retries: int = 0


def refresh(
    factor: KroneckerFactor,
    *,
    method: str = "eigh",
    previous: Eigenbasis | None = None,
    tolerances: WarmStart | None = None,
) -> Refreshed[Eigenbasis]:
    """Decompose a usable factor, or mend the previous basis where that is enough.

    Synchronises with the device, as every decomposition does; called on refresh steps only.

    Args:
        method: a name in ``EIGEN_METHODS``.
        previous: this side's last basis, to start from. Unused without ``tolerances``.
        tolerances: when that is enough; None always decomposes.
    """
    side, retries = factor.side, 0
    if side.block == 0:
        return Refreshed(Eigenbasis((), factor.packed_P.new_ones(side.dim)), "diagonal")
    if side.block == 1:
        return Refreshed(Eigenbasis((), factor.packed_P.clamp(min=0)), "diagonal")
    groups = side.blocks(factor.packed_P)
    if previous is not None and tolerances is not None:
        warm = warmed(groups, previous.vectors, previous.values, tolerances)
        if warm is not None:
            return Refreshed(previous if warm.how == "kept" else Eigenbasis(warm.vectors, warm.values), warm.how)
    values, vectors = [], []
    for blocks in groups:
        decomposed, failed = climb(blocks, EIGEN_METHODS[method])
        retries += failed
        if decomposed is None:
            return Refreshed(None, "failed", retries)
        values.append(decomposed[0].reshape(-1))
        vectors.append(decomposed[1])
    return Refreshed(Eigenbasis(tuple(vectors), torch.cat(values)), "eigh", retries)


def climb(blocks: Tensor, decompose: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...] | None, int]:
    """The ladder on failure: as given, in float64, in float64 on the CPU. A result that is not finite is a failure.

    Returns the results on the device of ``blocks``, None if every rung failed; and how many did.

    The input is checked by the caller (LAPACK returns NaN for NaN without a word, cuSOLVER raises).
    """
    rungs = [blocks, blocks.double()]
    if blocks.device.type != "cpu":
        rungs.append(blocks.double().cpu())
    for failures, matrix in enumerate(rungs):
        try:
            found = decompose(matrix)
        except RuntimeError:  # LinAlgError, or cuSOLVER's own; the next rung is more exact, then elsewhere
            continue
        if bool(torch.stack([torch.isfinite(part).all() for part in found]).all()):
            return tuple(part.to(blocks.device) for part in found), failures
    return None, len(rungs)
