"""Every op in plain torch, written to be read: the specification that faster backends are tested against.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a layer's matrix.
"""

import torch
from torch import Tensor


def packed_numel(dim: int) -> int:
    """Elements of a packed D x D symmetric matrix: D(D+1)/2."""
    return dim * (dim + 1) // 2


def symmetric_pack(x_DD: Tensor) -> Tensor:
    """Lower triangle of ``x_DD``, row by row: element (r, c) lies at r(r+1)/2 + c. Returns [P]."""
    rows, columns = torch.tril_indices(*x_DD.shape, device=x_DD.device)
    return x_DD[rows, columns]


def symmetric_unpack(x_P: Tensor, *, dim: int) -> Tensor:
    """The symmetric [D, D] matrix whose lower triangle is ``x_P``; inverse of :func:`symmetric_pack`."""
    x_DD = x_P.new_zeros(dim, dim)
    rows, columns = torch.tril_indices(dim, dim, device=x_P.device)
    x_DD[rows, columns] = x_P
    x_DD[columns, rows] = x_P
    return x_DD


def syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, ones_column: bool = False) -> Tensor:
    """Add X^T X to a packed fp32 sum: ``sum_P += pack(X^T X)``, with X = [x_ND, 1] if ``ones_column``.

    The ones column is how a bias enters a factor: it is the weight of a constant input.
    """
    x_ND = x_ND.float()
    if ones_column:
        x_ND = torch.cat([x_ND, x_ND.new_ones(len(x_ND), 1)], dim=1)
    return sum_P.add_(symmetric_pack(x_ND.T @ x_ND))


def eigen_scale(x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Tensor | float) -> Tensor:
    """Divide by the damped Kronecker eigenvalues: x_OI / (values_O values_I^T + damping)."""
    return x_OI / (torch.outer(values_O, values_I) + damping)
