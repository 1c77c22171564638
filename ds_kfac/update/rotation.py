"""Gradients into their eigenbasis and back, in a precision; also of several layers of equal shape at once, as the
launches of one cost more than its products.

Shape suffixes: O, I a layer's sides, n layers of equal shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis, Precision, fp32_products
from ds_kfac.ops.functional import block_product

AT_ONCE = 1 << 22
"""Elements of a large matrix that are rotated, or folded into moments, at once, and of the layers that are in memory
together on a CPU: 16 MiB."""
STACKED = 1 << 24
"""Elements of the layers that a GPU takes together, unless one alone has more: 64 MiB."""


def in_memory(*, stacked: bool) -> int:
    """Elements of the layers whose directions are in memory together, unless one alone has more."""
    return STACKED if stacked else AT_ONCE


def is_large(x_OI: Tensor) -> bool:
    """Whether it is a single matrix that is taken some rows at a time."""
    return x_OI.ndim == 2 and x_OI.numel() > AT_ONCE


def rows_at_once(x_OI: Tensor) -> int:
    """At least one."""
    return max(1, AT_ONCE // x_OI.shape[-1])


WHITEN_DAMPING = 0.01
"""Added to A's eigenvalues for whitening, in units of their mean."""
LEAST = 8.0
"""In eps, of what is not rounding. Sums over rows and their running average leave of a null eigenvalue up to 5 eps of
the largest, also where a factor is narrow (docs/math.md)."""


@dataclass(frozen=True)
class Rotation:
    """Of one matrix [O, I], or of n at once [n, O, I]: of several layers, or the groups of one.

    Attributes:
        G, A: eigenvectors: of one layer as in ``Eigenbasis.vectors``, of n one [n, O, O] and [n, I, I], or nothing
            where Q is the identity.
        values_G, values_A: fp32 [.., O] and [.., I]; of a layer in groups flat.
    """

    G: tuple[Tensor, ...]
    A: tuple[Tensor, ...]
    values_G: Tensor
    values_A: Tensor
    precision: Precision
    _whitenings: dict[float, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, bases: Sequence[LayerBasis], precision: Precision = HIGHEST) -> "Rotation":
        """Of one layer its own eigenvectors, of several a copy; these have dense sides or sides without vectors."""
        sides = [basis.G for basis in bases], [basis.A for basis in bases]
        if len(bases) == 1:
            return cls(bases[0].G.vectors, bases[0].A.vectors, bases[0].G.values, bases[0].A.values, precision)
        G, A = (side[0].vectors and (torch.cat([basis.vectors[0] for basis in side]),) for side in sides)
        values_G, values_A = (torch.stack([basis.values for basis in side]) for side in sides)
        return cls(G, A, values_G, values_A, precision)

    def whitening(self, power: float, *, groups: int = 1) -> Tensor:
        """(alpha / mean alpha + WHITEN_DAMPING)^-power, fp32 [.., I]: A^-power as it is in the eigenbasis; 0 where
        alpha is rounding, see :func:`not_rounding`.

        Args:
            groups: of the layer, if it is in groups: each has its own mean.
        """
        if power not in self._whitenings:
            values = self.values_A if groups == 1 else self.values_A.view(groups, -1)
            mean = values.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            self._whitenings[power] = (values / mean + WHITEN_DAMPING) ** -power * self.seen_A.view(values.shape)
        return self._whitenings[power]

    @cached_property
    def seen_A(self) -> Tensor:
        """Directions that inputs have a part in, fp32 like ``values_A``, see :func:`not_rounding`."""
        return not_rounding(self.A, self.values_A)

    @cached_property
    def seen_G(self) -> Tensor:
        """Directions that gradients of outputs have a part in, fp32 like ``values_G``: those of a softmax sum to zero
        over its classes."""
        return not_rounding(self.G, self.values_G)

    def only_seen(self, x_OI: Tensor, *, columns: bool = True) -> None:
        """Zero, in place, in a rotated matrix what :attr:`seen_G`, and if ``columns`` :attr:`seen_A`, leave out."""
        *several, rows, width = x_OI.shape
        if self.G:
            x_OI.mul_(self.seen_G.view(*several, rows, 1))
        if self.A and columns:
            x_OI.mul_(self.seen_A.view(*several, 1, width))

    def rotate(self, x_OI: Tensor, *, given_up: bool = False) -> Tensor:
        """Q_G^T x Q_A, see :meth:`_product`."""
        return self._product([vectors.mT for vectors in self.G], x_OI, self.A, given_up)

    def restore(self, x_OI: Tensor, *, rows: bool = True, columns: bool = True, given_up: bool = False) -> Tensor:
        """Q_G x Q_A^T, or one of its two halves."""
        right = [vectors.mT for vectors in self.A] if columns else ()
        return self._product(self.G if rows else (), x_OI, right, given_up)

    def _product(self, left: Sequence[Tensor], x_OI: Tensor, right: Sequence[Tensor], given_up: bool) -> Tensor:
        """left x right; of a large matrix that is given up and whose rows stay apart in its place, so that it is not
        there twice."""
        with fp32_products(self.precision.products, x_OI.device):
            if left or not (given_up and is_large(x_OI)):
                return block_product(left, x_OI, right)
            for rows in x_OI.split(rows_at_once(x_OI)):
                rows.copy_(block_product((), rows, right))
        return x_OI


def not_rounding(vectors: Sequence[Tensor], values: Tensor) -> Tensor:
    """fp32 like ``values``: 0 where a factor's eigenvalue is rounding, below max(8, sqrt(b)) eps of the largest of its
    block of width b, else 1. No row that the factor is made of has a part in such a direction, and no gradient: what is
    found of it there is rounding too. 1 of a zero block, and of a side without vectors, whose values are exact.

    Args:
        vectors: [n, b, b] per group of equal blocks.
    """
    if not vectors:
        return torch.ones_like(values)
    found = []
    for group, part in zip(vectors, values.view(-1).split([v.shape[0] * v.shape[1] for v in vectors]), strict=True):
        blocks = part.view(group.shape[:2])
        rounding = max(LEAST, group.shape[1] ** 0.5) * torch.finfo(torch.float32).eps
        found.append((blocks >= rounding * blocks.amax(-1, keepdim=True)).view(-1))
    return torch.cat(found).view(values.shape).to(values.dtype)


def turn_(x_OI: Tensor, old: LayerBasis | None, new: LayerBasis) -> None:
    """Out of an eigenbasis (None: the layer's own coordinates) into another, in place, a large matrix some rows at a
    time. In fp32: an error would stay in the moments.

    Args:
        x_OI: fp32 [O, I], contiguous.
    """
    olds = (None, None) if old is None else (old.G, old.A)
    with torch.autocast(x_OI.device.type, enabled=False), fp32_products("ieee", x_OI.device):
        # Q_G'^T Q_G and Q_A^T Q_A' for the new Q'; nothing of a side that is the same
        overlaps = [_overlap(before, now) for before, now in zip(olds, (new.G, new.A), strict=True)]
        left, right = [vectors.mT for vectors in overlaps[0]], overlaps[1]
        if not is_large(x_OI):
            x_OI.copy_(block_product(left, x_OI, right))
            return
        if left:
            x_OI.copy_(block_product(left, x_OI, ()))
        for rows in x_OI.split(rows_at_once(x_OI)):
            rows.copy_(block_product((), rows, right))


def _overlap(old: Eigenbasis | None, new: Eigenbasis) -> Sequence[Tensor]:
    vectors = () if new is old else new.vectors
    if old is None or not old.vectors or not vectors:
        return vectors
    return [before.mT @ now for before, now in zip(old.vectors, vectors, strict=True)]


PIECE = 1 << 22
"""Elements, 32 MiB in float64."""


def norms(x: Tensor) -> Tensor:
    """Norms of vectors [.., n], float64 [..]: the square of a finite number may be infinite in fp32.

    Piece by piece, because of each a copy in float64 may be made.
    """
    parts = [torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64) for piece in x.split(PIECE, dim=-1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).norm(dim=0)


def lengths(matrices: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    """Frobenius norms [n] of n tensors, on a GPU in few launches and without copies; see :func:`norms`."""
    if all(x.numel() <= PIECE or x.device.type != "cpu" for x in matrices):
        return torch.stack(torch._foreach_norm(list(matrices), 2, dtype))
    return torch.stack([norms(x.flatten()) for x in matrices]).to(dtype)
