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


def syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None) -> Tensor:
    """Add X^T X to a packed fp32 sum: ``sum_P += pack(X^T X)``, with X = [x_ND, ones_column] if that is given.

    The ones column is how a bias enters a factor: it is the weight of a constant input. Its entries are 1, or 0 where
    a row is all zeros because it does not count.
    """
    x_ND = x_ND.float()
    if ones_column is not None:
        x_ND = torch.cat([x_ND, ones_column.float()], dim=1)
    return sum_P.add_(symmetric_pack(x_ND.T @ x_ND))


def block_syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, block: int) -> Tensor:
    """Add the diagonal blocks of X^T X, each packed, to a fp32 sum: D / block triangles one after the other."""
    triangles = [symmetric_pack(part.T @ part) for part in x_ND.float().split(block, dim=1)]
    return sum_P.add_(torch.cat(triangles))


def count_accumulate_(sum_D: Tensor, index_N: Tensor) -> Tensor:
    """Add the second moment of one-hot rows, a diagonal: ``sum_D[i] += number of entries equal to i``.

    Negative entries do not count.
    """
    return sum_D.add_(torch.bincount(index_N[index_N >= 0], minlength=len(sum_D)).to(sum_D.dtype))


def eigen_scale(
    x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Tensor | float, *, exponent: float = 1.0
) -> Tensor:
    """Divide by the damped Kronecker eigenvalues: x_OI / (values_O values_I^T + damping)^exponent."""
    return x_OI / (torch.outer(values_O, values_I) + damping) ** exponent
