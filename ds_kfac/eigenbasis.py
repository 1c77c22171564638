"""Eigenbases of a side and of a layer, and their refreshes.

Shape suffixes: D a side's width, O and I the sides of a layer's matrix, n blocks of width b.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from ds_kfac.eigensolver import Method, Problem, Solution, grouped, solve
from ds_kfac.factor import KroneckerFactor
from ds_kfac.side import Side
from ds_kfac.warm_start import WarmStart, warmed


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
        """Every entry of Q squared: how a diagonal of second moments is carried over, see ``moments.py``."""
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


EIGEN_METHODS: dict[str, Method] = {"eigh": eigh}


T = TypeVar("T")


@dataclass(frozen=True)
class Refreshed(Generic[T]):
    """What a refresh came to.

    Attributes:
        basis: an eigenbasis, or a damped inverse (``inverse.py``); None when every rung of the ladder failed for some
            block.
        how: "kept" (``basis`` is the previous one), "values" (new values, the very same vectors), "qr" (new vectors by
            orthogonal iteration), "eigh" (exact), "cholesky" (a new inverse), "diagonal" (of a diagonal or identity
            side, nothing to decompose),
            "failed".
        retries: rungs of the ladder that failed.
    """

    basis: T | None
    how: Literal["kept", "values", "qr", "eigh", "cholesky", "diagonal", "failed"]
    retries: int = 0


@dataclass(frozen=True)
class Due:
    """A usable factor that is to be refreshed.

    Attributes:
        previous: this side's last basis, to start from. Unused without a warm start.
        qr_steps: refreshes since an exact one.
    """

    factor: KroneckerFactor
    previous: Eigenbasis | None = None
    qr_steps: int = 0


def refresh(
    factor: KroneckerFactor,
    *,
    method: str = "eigh",
    previous: Eigenbasis | None = None,
    tolerances: WarmStart | None = None,
) -> Refreshed[Eigenbasis]:
    """One factor, see :func:`refresh_all`."""
    return refresh_all([Due(factor, previous)], method=method, tolerances=tolerances)[0]


def refresh_all(dues: Sequence[Due], *, method: str = "eigh", tolerances: WarmStart | None = None) -> list[Refreshed]:
    """Decompose factors, or mend the previous bases where that is enough. In the order given.

    Synchronises with the device, as every decomposition does; called on refresh steps only. On a CPU each factor is
    for itself; on a GPU they are solved together, see ``eigensolver.py``.

    Args:
        method: a name in ``EIGEN_METHODS``.
        tolerances: when previous bases are enough, or how many steps follow them; None always decomposes.
    """
    if not dues:
        return []
    device = dues[0].factor.packed_P.device
    parts = [dues] if grouped(device) else [[due] for due in dues]
    return [result for part in parts for result in _refreshed(part, method, tolerances, device)]


def _refreshed(dues: Sequence[Due], method: str, tolerances: WarmStart | None, device: torch.device) -> list[Refreshed]:
    results = [_mended(due, tolerances) for due in dues]
    problems = [_problems(due, tolerances) if result is None else [] for due, result in zip(dues, results, strict=True)]
    asked = [problem for own in problems for problem in own]
    solutions = iter(solve(asked, EIGEN_METHODS[method], device) if asked else ())
    return [
        _assembled([next(solutions) for _ in own]) if result is None else result
        for own, result in zip(problems, results, strict=True)
    ]


def _mended(due: Due, tolerances: WarmStart | None) -> Refreshed | None:
    """Without a solver: a diagonal, or what a warm start finds to be enough."""
    side, packed_P = due.factor.side, due.factor.packed_P
    if side.block == 0:
        return Refreshed(Eigenbasis((), packed_P.new_ones(side.dim)), "diagonal")
    if side.block == 1:
        return Refreshed(Eigenbasis((), packed_P.clamp(min=0)), "diagonal")
    previous = due.previous
    if previous is None or tolerances is None or not tolerances.looks:
        return None
    warm = warmed(side.blocks(packed_P), previous.vectors, previous.values, tolerances)
    if warm is None:
        return None
    return Refreshed(previous if warm.how == "kept" else Eigenbasis(warm.vectors, warm.values), warm.how)


def _problems(due: Due, tolerances: WarmStart | None) -> list[Problem]:
    """One per group of equal blocks."""
    side, previous = due.factor.side, due.previous
    steps = previous is not None and tolerances is not None and due.qr_steps < tolerances.exact_every - 1
    starts: list[tuple[Tensor, Tensor] | None] = [None] * len(side.groups)
    if steps and previous is not None:
        pieces = previous.values.split([count * width for count, width in side.groups])
        pairs = zip(pieces, previous.vectors, strict=True)
        starts = [(values.view(vectors.shape[:-1]), vectors) for values, vectors in pairs]
    return [
        Problem(shape, partial(side.group, due.factor.packed_P, index), start)
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
