"""For one factor, what the product does for several at once; and random factors of any side."""

import torch
from torch import Tensor

from ds_kfac.curvature import factor as factors
from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis, Refreshed, Request, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.ops.functional import block_product

SIDES = [
    Side.dense(1),
    Side.dense(63),
    Side.dense(130),
    Side(63, 20),
    Side(64, 2),
    Side.diagonal(9),
    Side.identity(9),
]


def fold(factor: KroneckerFactor, sum_P: Tensor, count: Tensor, *, decay: float) -> KroneckerFactor:
    """With one batch averaged in, in place."""
    factors.average_([factor], [sum_P], count[None], [decay])
    return factor


def refresh(factor: KroneckerFactor, *, previous: Eigenbasis | None = None, **options) -> Refreshed:
    """Decomposed; options are those of ``refresh_all``."""
    return refresh_all([Request(factor, previous)], **options)[0]


def random_factor(
    side: Side, seed: int = 0, *, rows: int = 0, decades: float = 0.0, device: str = "cpu"
) -> KroneckerFactor:
    """The second moment of random rows, 2 D if not said, whose sizes fall over so many decades:
    then eigenvalues are well apart."""
    rows = rows or 2 * side.dim
    x = torch.randn(rows, side.dim, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(0, -decades, side.dim)
    packed = side.accumulate_(torch.zeros(side.numel), x) / rows
    return KroneckerFactor(side, packed.to(device), torch.ones((), device=device))


def dense_matrix(factor: KroneckerFactor) -> Tensor:
    """The whole side in float64: its blocks on a diagonal, or the identity."""
    blocks = [block for group in factor.side.blocks(factor.packed_P) for block in group]
    matrix = torch.block_diag(*blocks) if blocks else torch.eye(factor.side.dim)
    return matrix.double()


def dense_vectors(basis: Eigenbasis) -> Tensor:
    """The eigenvectors in the columns of one matrix, in float64."""
    identity = torch.eye(len(basis.values), device=basis.values.device)
    return block_product(basis.vectors, identity, ()).double()


def random_basis(rows: int, columns: int, seed: int = 0) -> LayerBasis:
    """Of factors of random rows."""
    sides = enumerate((rows, columns), 2 * seed)
    return LayerBasis(*(refresh(random_factor(Side.dense(dim), at)).basis for at, dim in sides))
