"""Eigenbases of a side and of a layer, and their refreshes.

Shape suffixes: D a side's width, O and I the sides of a layer's matrix, n blocks of width b.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigensolver import Problem, Solution, grouped, solve
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.curvature.side import Side


@dataclass(frozen=True)
class Eigenbasis:
    """factor = Q diag(values) Q^T with an orthogonal, block-diagonal Q.

    Attributes:
        vectors: fp32 [n, b, b] per group of equal blocks, eigenvectors in columns; empty if Q is the identity, as it
            is for a diagonal factor.
        values: fp32 [D], clamped at 0 (a second moment has no negative ones except by rounding). From a decomposition
            they ascend in each block; after a QR step, which keeps every vector at its place, they need not.
    """

    vectors: tuple[Tensor, ...]
    values: Tensor

    @property
    def nbytes(self) -> int:
        return sum(vectors.nbytes for vectors in self.vectors) + self.values.nbytes

    @cached_property
    def half_vectors(self) -> tuple[Tensor, ...]:
        """The vectors in bf16, made once: for products in mixed precision."""
        return tuple(vectors.bfloat16() for vectors in self.vectors)

    def rounded(self, dtype: torch.dtype) -> "Eigenbasis":
        """With vectors as they are after travelling in ``dtype``; itself in fp32."""
        if dtype is torch.float32:
            return self
        return Eigenbasis(tuple(vectors.to(dtype).float() for vectors in self.vectors), self.values)

    def rotate(self, x_D: Tensor) -> Tensor:
        """Q^T x for x [D, any]."""
        return apply_blocks(x_D, [vectors.mT for vectors in self.vectors])

    def restore(self, x_D: Tensor) -> Tensor:
        """Q x for x [D, any]; undoes :meth:`rotate`."""
        return apply_blocks(x_D, self.vectors)

    def overlap(self, old: "Eigenbasis | None") -> "Eigenbasis":
        """The basis whose ``rotate`` takes coordinates in ``old`` (None, or one without vectors: unrotated) to
        coordinates in this one."""
        if old is None or not old.vectors or not self.vectors:
            return self
        return Eigenbasis(
            tuple(before.mT @ now for before, now in zip(old.vectors, self.vectors, strict=True)), self.values
        )

    def squared(self) -> "Eigenbasis":
        """Every entry of Q squared: how a diagonal of second moments leaves a basis, see ``checkpoint/files.py``."""
        return Eigenbasis(tuple(vectors.square() for vectors in self.vectors), self.values)


def apply_blocks(x_D: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """A block-diagonal matrix times x [D, any]; x itself without blocks.

    Args:
        matrices: [n, b, b] per group of equal blocks.
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


def sided(left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor], x_OI: Tensor) -> Tensor:
    """Block-diagonal matrices applied to the rows and to the columns of x [O, I], or of a stack [groups, O, I]."""
    if x_OI.ndim == 2:
        return right(left(x_OI).T).T
    x_IO = left(x_OI.flatten(0, 1)).view(x_OI.shape).mT
    return right(x_IO.flatten(0, 1)).view(x_IO.shape).mT


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
    """The eigenbasis of a layer's Fisher, G kron A: rows by G, columns by A. Of a layer in groups the matrices are
    stacked, [groups, O, I], and the blocks of both bases follow each other."""

    G: Eigenbasis
    A: Eigenbasis

    @property
    def nbytes(self) -> int:
        return self.G.nbytes + self.A.nbytes

    def rotate(self, x_OI: Tensor) -> Tensor:
        """Q_G^T x Q_A."""
        return sided(self.G.rotate, self.A.rotate, x_OI)

    def restore(self, x_OI: Tensor) -> Tensor:
        """Q_G x Q_A^T."""
        return sided(self.G.restore, self.A.restore, x_OI)

    def overlap(self, old: "LayerBasis | None") -> "LayerBasis":
        """See :meth:`Eigenbasis.overlap`."""
        return LayerBasis(self.G.overlap(old.G if old else None), self.A.overlap(old.A if old else None))

    def squared(self) -> "LayerBasis":
        """See :meth:`Eigenbasis.squared`."""
        return LayerBasis(self.G.squared(), self.A.squared())


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Exact decomposition of [n, b, b] in its own dtype and place; (values, vectors) in fp32."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.float().clamp(min=0), vectors.float().contiguous()


T = TypeVar("T")


@dataclass(frozen=True)
class Refreshed(Generic[T]):
    """What a refresh came to.

    Attributes:
        basis: what ``FACTOR_FORMS`` says is kept; None when every rung of the ladder failed for some block.
        how: "qr" (new vectors by orthogonal iteration), "eigh" (exact), "cholesky" (a new inverse), "newton" (a root by
            products), "diagonal" (of a diagonal or identity side, nothing to decompose), "failed".
        retries: rungs of the ladder that failed.
    """

    basis: T | None
    how: Literal["qr", "eigh", "cholesky", "newton", "diagonal", "failed"]
    retries: int = 0


@dataclass(frozen=True)
class Request:
    """A usable factor to decompose.

    Attributes:
        previous: what it was last decomposed to, for a QR step to start from.
        qr_steps: decompositions since an exact one.
        partner: the layer's other factor, where a form needs it (``curvature/forms.py``).
        groups: of the layer, whose factor is that of each after the other.
    """

    factor: KroneckerFactor
    previous: Any = None
    qr_steps: int = 0
    partner: KroneckerFactor | None = None
    groups: int = 1


def refresh_all(requests: Sequence[Request], *, exact_every: int = 1) -> list[Refreshed]:
    """Decompose factors, or take a QR step from their previous bases. In the order given.

    Synchronises with the device, as every decomposition does; called on refresh steps only. On a CPU each factor is
    for itself; on a GPU they are solved together, see ``curvature/eigensolver.py``.

    Args:
        exact_every: of so many refreshes of a factor one is exact and the others are QR steps.
    """
    if not requests:
        return []
    device = requests[0].factor.packed_P.device
    parts = [requests] if grouped(device) else [[request] for request in requests]
    return [result for part in parts for result in _refreshed(part, exact_every, device)]


def _refreshed(requests: Sequence[Request], exact_every: int, device: torch.device) -> list[Refreshed]:
    results = [_diagonal(request.factor) for request in requests]
    problems = [
        _problems(request, exact_every) if found is None else []
        for request, found in zip(requests, results, strict=True)
    ]
    asked = [problem for own in problems for problem in own]
    solutions = iter(solve(asked, eigh, device) if asked else ())
    return [
        _assembled([next(solutions) for _ in own]) if result is None else result
        for own, result in zip(problems, results, strict=True)
    ]


def _diagonal(factor: KroneckerFactor) -> Refreshed | None:
    """Of a side that needs no solver; None of any other."""
    side, packed_P = factor.side, factor.packed_P
    if side.block == 0:
        return Refreshed(Eigenbasis((), packed_P.new_ones(side.dim)), "diagonal")
    if side.block == 1:
        return Refreshed(Eigenbasis((), packed_P.clamp(min=0)), "diagonal")
    return None


def _problems(request: Request, exact_every: int) -> list[Problem]:
    """One per group of equal blocks."""
    side, previous = request.factor.side, request.previous
    starts: list[tuple[Tensor, Tensor] | None] = [None] * len(side.groups)
    if previous is not None and request.qr_steps < exact_every - 1:
        pieces = previous.values.split([count * width for count, width in side.groups])
        pairs = zip(pieces, previous.vectors, strict=True)
        starts = [(values.view(vectors.shape[:-1]), vectors) for values, vectors in pairs]
    return [
        Problem(shape, partial(side.group, request.factor.packed_P, index), start)
        for index, (shape, start) in enumerate(zip(side.groups, starts, strict=True))
    ]


def _assembled(solutions: Sequence[Solution]) -> Refreshed:
    """A factor's; exact if all of its blocks are."""
    retries = sum(solution.retries for solution in solutions)
    found = [solution.found for solution in solutions if solution.found is not None]
    if len(found) < len(solutions):
        return Refreshed(None, "failed", retries)
    basis = Eigenbasis(tuple(vectors for _, vectors in found), torch.cat([values.reshape(-1) for values, _ in found]))
    return Refreshed(basis, "qr" if any(solution.how == "qr" for solution in solutions) else "eigh", retries)
