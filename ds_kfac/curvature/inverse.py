"""Damped inverses of a layer's two factors, in place of their eigenbases.

    V = (G + sqrt(lambda) / pi I)^-1 dW (A + pi sqrt(lambda) I)^-1        pi = sqrt(mean(A) / mean(G))

Two products a step instead of four, and a Cholesky decomposition instead of an eigendecomposition. The damping is
part of what is inverted: another value takes effect at the next refresh.

Sources: Martens & Grosse 2015 (arXiv:1503.05671), sec. 6.3; Pauloski et al. 2021 (KAISA, arXiv:2107.01739).

Shape suffixes: D a side's width, P its packed elements, O and I the sides of a layer's matrix, n blocks of width b.
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
    climb,
    fp32_products,
    grouped,
    load_solvers,
    probe,
)
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.ops.dispatch import symmetric_pack_into_
from ds_kfac.ops.functional import Scalar, block_product, packed_numel

FACTORED_DAMPING: dict[str, Callable[[float, Scalar, Scalar], Scalar]] = {
    "tikhonov": lambda value, mean, partner: (value * mean / partner) ** 0.5,
    "relative": lambda value, mean, partner: value**0.5 * mean,
}
"""What is added to a factor, of lambda and the means of the diagonals of this factor and of the layer's other one: A
gets pi sqrt(lambda), G sqrt(lambda) / pi. "relative": lambda is times mean(A) mean(G), the partner's mean cancels."""


@dataclass(frozen=True)
class DampedInverse:
    """(factor + damping I)^-1.

    Attributes:
        blocks: fp32 [n, b, b] per group of equal blocks, symmetric to the bit; empty for a diagonal or an identity.
        diagonal: fp32 [D] of a diagonal; else None. An identity has neither: its damping is a number, which is in its
            partner's inverse.
    """

    blocks: tuple[Tensor, ...] = ()
    diagonal: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.blocks if self.diagonal is None else (self.diagonal,)

    def rounded(self, dtype: torch.dtype) -> "DampedInverse":
        """Itself: see :func:`packed`."""
        return self


def inverse_numel(side: Side) -> int:
    """Elements of a side's inverse as it is kept, blocks whole; an identity has none."""
    return sum(count * width**2 for count, width in side.groups)


def packed(inverse: DampedInverse) -> Tensor:
    """The lower triangles of all blocks, or the diagonal itself, as one flat fp32 tensor [P]: half of an eigenbasis.

    It travels in fp32 always. Rounding every entry to 16 bits would move the small eigenvalues, those of the sharpest
    directions, below zero, and fp16 would overflow where a factor is small.
    """
    if not inverse.blocks:
        return inverse.diagonal if inverse.diagonal is not None else torch.empty(0)
    matrices = [matrix for blocks in inverse.blocks for matrix in blocks]
    ends = list(accumulate(packed_numel(len(matrix)) for matrix in matrices))
    out = torch.empty(ends[-1], device=matrices[0].device)
    symmetric_pack_into_(out, [0, *ends[:-1]], matrices)
    return out


def from_packed(side: Side, flat_P: Tensor) -> DampedInverse:
    """Inverse of :func:`packed`, to the bit; a copy."""
    if side.block == 1:
        return DampedInverse(diagonal=flat_P.clone())
    # blocks of width 1 are views of it
    return DampedInverse(tuple(block.clone() if block.shape[-1] == 1 else block for block in side.blocks(flat_P)))


@dataclass(frozen=True)
class LayerInverse:
    """The damped inverse of a layer's Fisher, G kron A: rows by G, columns by A."""

    G: DampedInverse
    A: DampedInverse

    def apply(self, x_OI: Tensor) -> Tensor:
        """G^-1 x A^-1."""
        x_OI = block_product(self.G.blocks, x_OI, self.A.blocks)
        x_OI = x_OI if self.G.diagonal is None else x_OI * self.G.diagonal.view(*x_OI.shape[:-1], 1)
        return x_OI if self.A.diagonal is None else x_OI * self.A.diagonal.view(*x_OI.shape[:-2], 1, -1)

    def precondition(
        self, gradient_OI: Tensor, *, damping: float, precision: Precision = HIGHEST
    ) -> tuple[Tensor, Tensor]:
        """V = G^-1 gradient A^-1, both damped, and <V, gradient>. Linear in the gradient. Cost: 2 O I (O + I) FLOPs.

        Args:
            damping: of this step, for a layer of two identities: it has nothing that is refreshed.
        """
        if not (self.G._parts or self.A._parts):
            V = gradient_OI / (1 + damping**0.5) ** 2
        else:
            with fp32_products(precision.products, gradient_OI.device):
                V = self.apply(gradient_OI)
        return V, (V * gradient_OI).sum(dim=(-2, -1))


def refresh_inverse(
    factor: KroneckerFactor, partner: KroneckerFactor | None, *, damping: float, damping_kind: str
) -> Refreshed[DampedInverse]:
    """Invert a usable factor. Synchronises with the device once per group of blocks and rung.

    Args:
        factor: of a dense, blocked or diagonal side.
        partner: the layer's other factor; None where it is elsewhere, which "relative" allows. An identity's own damped
            inverse, a number, is taken into this one.
    """
    side, mean = factor.side, _mean(factor)
    damp = FACTORED_DAMPING[damping_kind]
    added = damp(damping, mean, 1.0 if partner is None else _mean(partner))
    with_identity = partner is not None and partner.side.block == 0
    scale = 1 / (1 + damp(damping, 1.0, mean)) if with_identity else 1.0
    if side.block == 1:
        return Refreshed(DampedInverse(diagonal=scale / (factor.packed_P.clamp(min=0) + added)), "diagonal")
    load_solvers(factor.packed_P.device)
    found, retries = [], 0
    for blocks in side.blocks(factor.packed_P):
        inverted, failed = climb(
            blocks,
            lambda rung: (cholesky_inverse(rung, added=added, scale=scale),),
            partial(_right, blocks, added=added, scale=scale),
        )
        retries += failed
        if inverted is None:
            return Refreshed(None, "failed", retries)
        found += inverted
    # as receivers unpack it: cuSOLVER's two triangles differ in rounding
    return Refreshed(from_packed(side, packed(DampedInverse(tuple(found)))), "cholesky", retries)


def cholesky_inverse(matrix: Tensor, *, added: Scalar, scale: Scalar = 1.0) -> Tensor:
    """scale (matrix + added I)^-1 of positive definite [n, b, b], computed in its dtype and place; fp32.

    NaN where the decomposition failed: the caller looks for it anyway, and asking here would wait for the device. The
    damping is added here, in the dtype of the rung: fp32 may round it away next to a large diagonal. Some processors
    find a pivot of rounding's size then where others find none, so that counts as failed, too.
    """
    damped = matrix.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(torch.as_tensor(added, device=matrix.device, dtype=matrix.dtype))
    rounding = 2 * torch.finfo(matrix.dtype).eps * diagonal.amax(dim=-1)
    lower, info = torch.linalg.cholesky_ex(damped)
    failed = (info != 0) | (lower.diagonal(dim1=-2, dim2=-1).square().amin(dim=-1) <= rounding)
    inverse = torch.cholesky_inverse(lower).mT.contiguous()  # it comes in columns; both triangles are nearly equal
    if not isinstance(scale, float) or scale != 1.0:
        inverse.mul_(torch.as_tensor(scale, device=matrix.device, dtype=matrix.dtype))
    return inverse.masked_fill_(failed[:, None, None], torch.nan).float()


def _right(blocks: Tensor, inverse: Tensor, *, added: Scalar, scale: Scalar) -> Tensor:
    right = torch.isfinite(inverse).flatten(1).all(-1)
    return right & credible(blocks, inverse, added=added, scale=scale) if grouped(blocks.device) else right


def credible(blocks: Tensor, inverse: Tensor, *, added: Scalar, scale: Scalar = 1.0) -> Tensor:
    """Bool [n]: whether (C + added I) inverse x = scale x for one x, as ``eigensolver.credible``."""
    x = probe(blocks)
    y = (inverse * x).sum(-1)
    off = (blocks * y.unsqueeze(-2)).sum(-1) + added * y - scale * x
    return off.norm(dim=-1) <= TOLERANCE * (blocks.flatten(1).norm(dim=-1) + added) * y.norm(dim=-1)


def _mean(factor: KroneckerFactor) -> Tensor:
    """Of the diagonal of the whole side; 1 for an identity."""
    return factor.side.diagonal_of(factor.packed_P).mean() if factor.side.block else factor.packed_P.new_ones(())
