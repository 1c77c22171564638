"""Damped inverses of a layer's two factors, which can be used instead of their eigenbases.

    V = (G + sqrt(lambda) / pi I)^-1 dW (A + pi sqrt(lambda) I)^-1,   pi = sqrt(mean(A) / mean(G))

A step needs two matrix products instead of four, and a refresh needs a Cholesky decomposition
instead of an eigendecomposition. The damping is part of the inverted matrix, so a new damping takes
effect at the next refresh.

Sources: Martens & Grosse 2015 (arXiv:1503.05671), sec. 6.3; Pauloski et al. 2021 (KAISA,
    arXiv:2107.01739).

Shape suffixes: D is the width of a side, P is its number of packed elements, O and I are the sides
of a layer's matrix, and n is a number of blocks of width b.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import (
    HIGHEST,
    TOLERANCE,
    Precision,
    Refreshed,
    fp32_products,
    probe,
    with_fallbacks,
)
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.ops.dispatch import symmetric_pack_into_
from ds_kfac.ops.functional import Scalar, block_product, packed_numel

FACTORED_DAMPING: dict[str, Callable[[float, Scalar, Scalar], Scalar]] = {
    "tikhonov": lambda value, mean, partner: (value * mean / partner) ** 0.5,
    "relative": lambda value, mean, partner: value**0.5 * mean,
}
"""For each kind of damping, a function that returns the number to add to a factor's diagonal. Its
arguments are lambda, the mean of the factor's diagonal, and the mean of the diagonal of its partner
(the layer's other factor). The number is pi sqrt(lambda) for A and sqrt(lambda) / pi for G. With
"relative" damping, lambda is first multiplied by mean(A) mean(G), so the partner's mean cancels."""


@dataclass(frozen=True)
class DampedInverse:
    """The inverse of a damped factor: (factor + damping I)^-1.

    Attributes:
        blocks: fp32 [n, b, b] for each group of equal blocks, exactly symmetric; empty for a
            diagonal or an identity.
        diagonal: fp32 [D] for a diagonal side, else None. An identity has neither blocks nor a
            diagonal. Its damped inverse is a single number, and the inverse of the layer's other
            factor is multiplied by this number.
    """

    blocks: tuple[Tensor, ...] = ()
    diagonal: Tensor | None = None

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.blocks if self.diagonal is None else (self.diagonal,)

    def rounded(self, dtype: torch.dtype) -> "DampedInverse":
        """Return this object unchanged, because an inverse is sent in fp32, see :func:`packed`."""
        return self


def packed(inverse: DampedInverse) -> Tensor:
    """Return the lower triangles of all blocks, or the diagonal, as one flat fp32 tensor [P]. This
    is half the size of an eigenbasis.

    The tensor is always sent in fp32. Rounding to 16 bits could make small eigenvalues of the
    inverse negative. These eigenvalues belong to the directions of largest curvature. fp16 would
    also overflow where a factor is small.
    """
    if inverse.diagonal is not None:
        return inverse.diagonal
    if not inverse.blocks:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    matrices = [matrix for blocks in inverse.blocks for matrix in blocks]
    ends = list(accumulate(packed_numel(len(matrix)) for matrix in matrices))
    out = torch.empty(ends[-1], device=matrices[0].device, dtype=torch.float32)
    symmetric_pack_into_(out, [0, *ends[:-1]], matrices)
    return out


def from_packed(side: Side, flat_P: Tensor) -> DampedInverse:
    """Undo :func:`packed`. The result is exact, and shares no memory with ``flat_P``."""
    if side.block == 1:
        return DampedInverse(diagonal=flat_P.clone())
    blocks = []
    for block in side.blocks(flat_P):
        is_view = block.shape[-1] == 1
        blocks.append(block.clone() if is_view else block)
    return DampedInverse(tuple(blocks))


@dataclass(frozen=True)
class LayerInverse:
    """The damped inverse of a layer's Fisher G kron A. The inverse of G acts on the rows of the
    gradient dW, and the inverse of A acts on its columns."""

    G: DampedInverse
    A: DampedInverse

    def apply(self, x_OI: Tensor) -> Tensor:
        """Return G^-1 x A^-1."""
        x_OI = block_product(self.G.blocks, x_OI, self.A.blocks)
        if self.G.diagonal is not None:
            x_OI = x_OI * self.G.diagonal.view(*x_OI.shape[:-1], 1)
        if self.A.diagonal is not None:
            x_OI = x_OI * self.A.diagonal.view(*x_OI.shape[:-2], 1, -1)
        return x_OI

    def precondition(
        self, gradient_OI: Tensor, *, damping: float, precision: Precision = HIGHEST
    ) -> tuple[Tensor, Tensor]:
        """Return V = G^-1 gradient A^-1, with both inverses damped, and <V, gradient>. V is linear
        in the gradient. The cost is 2 O I (O + I) FLOPs.

        Args:
            gradient_OI: fp32 [O, I], or [groups, O, I] for a layer in groups.
            damping: the step's damping. It is used only if both sides are identities. Otherwise the
                inverses already include the damping.
        """
        if not (self.G._parts or self.A._parts):
            V = gradient_OI / (1 + damping**0.5) ** 2
        else:
            with fp32_products(precision.products, gradient_OI.device):
                V = self.apply(gradient_OI)
        return V, (V * gradient_OI).sum(dim=(-2, -1))


def refresh_inverse(
    factor: KroneckerFactor, partner: KroneckerFactor | None, *, damping: float, damping_kind: str
) -> Refreshed:
    """Invert a factor. Synchronises with the device for each group of blocks, once per attempt.

    Args:
        factor: a :func:`~ds_kfac.curvature.factor.usable` factor whose side is dense, blocked or
            diagonal.
        partner: the layer's other factor. May be None if the damping is "relative" and the other
            factor is not an identity. The damped inverse of an identity is a number, by which the
            inverse of ``factor`` is multiplied.
    """
    side = factor.side
    mean = _mean(factor)
    damp = FACTORED_DAMPING[damping_kind]
    added = damp(damping, mean, 1.0 if partner is None else _mean(partner))
    scale: Scalar = 1.0
    if partner is not None and partner.side.block == 0:
        scale = 1 / (1 + damp(damping, 1.0, mean))
    if side.block == 1:
        diagonal = scale / (factor.packed_P.clamp(min=0) + added)
        return Refreshed(DampedInverse(diagonal=diagonal), "diagonal")
    inverses: list[Tensor] = []
    retries = 0
    for blocks in side.blocks(factor.packed_P):
        inverted, failed = with_fallbacks(
            blocks,
            lambda matrices: (cholesky_inverse(matrices, added=added, scale=scale),),
            partial(passes_residual_check, blocks, added=added, scale=scale),
        )
        retries += failed
        if inverted is None:
            return Refreshed(None, "failed", retries)
        inverses += inverted
    # The two triangles that cuSOLVER computes differ by rounding errors. Other ranks receive only
    # the lower triangle, so this rank must also use only the lower triangle.
    inverse = from_packed(side, packed(DampedInverse(tuple(inverses))))
    return Refreshed(inverse, "cholesky", retries)


def cholesky_inverse(matrix: Tensor, *, added: Scalar, scale: Scalar = 1.0) -> Tensor:
    """Return scale (matrix + added I)^-1 in fp32, computed in the matrices' dtype and on their
    device.

    If the Cholesky decomposition of a matrix fails, the matrix's result is NaN. The caller checks
    for NaN anyway, and a check here would wait for the device. A pivot as small as rounding errors
    also counts as a failure, because only some processors report an error for such a pivot. The
    damping is added in the dtype of the matrices. In fp32 it may be lost next to a large diagonal.

    Args:
        matrix: positive definite [n, b, b].
    """
    damped = matrix.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(torch.as_tensor(added, device=matrix.device, dtype=matrix.dtype))
    rounding = 2 * torch.finfo(matrix.dtype).eps * diagonal.amax(dim=-1)
    lower, info = torch.linalg.cholesky_ex(damped)
    failed = (info != 0) | (lower.diagonal(dim1=-2, dim2=-1).square().amin(dim=-1) <= rounding)
    # torch returns the inverse in column-major order. It may be transposed, because it is symmetric
    # up to rounding errors.
    inverse = torch.cholesky_inverse(lower).mT.contiguous()
    if not isinstance(scale, float) or scale != 1.0:
        inverse.mul_(torch.as_tensor(scale, device=matrix.device, dtype=matrix.dtype))
    return inverse.masked_fill_(failed[:, None, None], torch.nan).float()


def passes_residual_check(
    blocks: Tensor, inverse: Tensor, *, added: Scalar, scale: Scalar = 1.0
) -> Tensor:
    """Check for each block C whether (C + added I) inverse x = scale x for one vector x. Returns
    bool [n]. Like the check of an eigenbasis, it does not use matrix products."""
    x = probe(blocks)
    y = (inverse * x).sum(-1)
    residual = (blocks * y.unsqueeze(-2)).sum(-1) + added * y - scale * x
    allowed = TOLERANCE * (blocks.flatten(1).norm(dim=-1) + added) * y.norm(dim=-1)
    return residual.norm(dim=-1) <= allowed


def _mean(factor: KroneckerFactor) -> Tensor:
    """Return the mean of a factor's diagonal; 1 for an identity."""
    if not factor.side.block:
        return factor.packed_P.new_ones(())
    return factor.side.diagonal_of(factor.packed_P).mean()
