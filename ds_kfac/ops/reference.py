"""Every op in plain torch, written to be read: the specification that faster backends are tested against.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a layer's matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.ops.functional import Scalar, Tensors, each, packed_numel


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


def symmetric_pack_into_(out: Tensor, starts: Sequence[int], matrices_DD: Tensors) -> None:
    """Lower triangles of fp32 matrices of several layers into one flat tensor, in its dtype (fp32, bf16, fp16).

    Rounding is to nearest, ties to even. Elements of ``out`` between the triangles are left alone.

    Args:
        starts: first element of each triangle in ``out``.
    """
    for start, x_DD in zip(starts, matrices_DD, strict=True):
        packed_P = symmetric_pack(x_DD)
        out[start : start + len(packed_P)] = packed_P.to(out.dtype)


def symmetric_unpack_from(packed: Tensor, starts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """The symmetric fp32 matrices whose lower triangles lie in a flat tensor of any floating dtype."""
    return [
        symmetric_unpack(packed[start : start + packed_numel(dim)].float(), dim=dim)
        for start, dim in zip(starts, dims, strict=True)
    ]


def ema_update_(
    averages_P: Tensors, sums_P: Tensors, counts: Tensors, updates: Tensors, decays: Sequence[float]
) -> Tensor:
    """Take one batch into the running averages of several factors, in place.

        average <- r average + (1 - r) sum / max(count, 1)    with r = min(1 - 1/updates, decay), updates <- updates + 1

    A factor whose count is 0, or whose sum has a value that is not finite, keeps average and updates. All fp32.

    Returns bool [n]: which were used.
    """
    used = []
    for average_P, sum_P, count, update, decay in zip(averages_P, sums_P, counts, updates, decays, strict=True):
        usable = (count > 0) & torch.isfinite(sum_P).all()
        update += usable
        keep = torch.clamp(1 - 1 / update.clamp(min=1), max=decay)
        new_P = keep * average_P + (1 - keep) * (sum_P / count.clamp(min=1))
        average_P.copy_(torch.where(usable, new_P, average_P))
        used.append(usable)
    return torch.stack(used)


def syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None, scale: Scalar = 1.0) -> Tensor:
    """Add to a packed fp32 sum: ``sum_P += scale * pack(X^T X)``, with X = [x_ND, ones_column] if that is given.

    The ones column is how a bias enters a factor: it is the weight of a constant input. Its entries are 1, or 0 where
    a row is all zeros because it does not count.

    Args:
        scale: a number, or a scalar on the device of the sum, of which the host does not wait. It comes after the
            product: 16-bit rows need not be rounded again.
    """
    x_ND = x_ND.float()
    if ones_column is not None:
        x_ND = torch.cat([x_ND, ones_column.float()], dim=1)
    return sum_P.add_(scale * symmetric_pack(x_ND.T @ x_ND))


def block_syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, block: int, scale: Scalar = 1.0) -> Tensor:
    """Add ``scale`` times the diagonal blocks of X^T X, each packed, to a fp32 sum: one triangle after the other."""
    triangles = [symmetric_pack(part.T @ part) for part in x_ND.float().split(block, dim=1)]
    return sum_P.add_(scale * torch.cat(triangles))


def eigen_scale_dot(x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Scalar) -> tuple[Tensor, Tensor]:
    """Divide by the damped Kronecker eigenvalues: scaled = x_OI / (values_O values_I^T + damping).

    This op, the one below and :func:`adam_scale` take n matrices of one shape as well: x [n, O, I], values [n, O] and
    [n, I], scalars [n].

    Returns scaled and the inner product of x and scaled, a fp32 scalar; of n matrices [n].
    """
    scaled_OI = x_OI / (values_O[..., :, None] * values_I[..., None, :] + each(damping))
    return scaled_OI, (x_OI * scaled_OI).sum(dim=(-2, -1))


def corrected_scale_dot(
    x_OI: Tensor, second_OI: Tensor, decay: Scalar, terms: Scalar, damping: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """Take x into its second moment and divide by that: EKFAC's step.

        new = r second + (1 - r) terms x^2        scaled = x / (new + damping)

    Args:
        second_OI: not changed.
        decay: r, a float or a scalar on the device. 1 leaves the moment as it is whatever x holds, also NaN: so a
            gradient that overflowed is kept out without asking the host.
        terms: factor on x^2, to the units of the Fisher: loss terms over the squared loss scale.

    Returns scaled, new, and the inner product as :func:`eigen_scale_dot`.
    """
    keep = each(torch.as_tensor(decay, device=x_OI.device))
    new_OI = torch.where(keep < 1, keep * second_OI + (1 - keep) * each(terms) * x_OI.square(), second_OI)
    scaled_OI = x_OI / (new_OI + each(damping))
    return scaled_OI, new_OI, (x_OI * scaled_OI).sum(dim=(-2, -1))


def adam_scale(
    x_OI: Tensor, first_OI: Tensor, second_OI: Tensor, updates: Tensor, usable: Tensor, *,
    betas: tuple[float, float], eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Take x into Adam's moments and divide one by the root of the other, both bias-corrected, k = updates + usable.

        m = b1 first + (1 - b1) x        v = b2 second + (1 - b2) x^2
        direction = (b1 m / (1 - b1^(k + 1)) + (1 - b1) x / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)

    with Nesterov's momentum: x is weighted as the next step's m will weight it (NAdam, Dozat 2016).

    Args:
        first_OI, second_OI: m and v so far, without that correction; not changed.
        updates: scalar on the device, what they hold so far.
        usable: bool scalar on the device. False keeps the moments, whatever x holds, also NaN; it is in the
            direction even so.

    Returns direction, m, v. Source: Kingma & Ba 2015 (arXiv:1412.6980).
    """
    m_OI = torch.where(each(usable), torch.lerp(x_OI, first_OI, betas[0]), first_OI)
    v_OI = torch.where(each(usable), torch.lerp(x_OI.square(), second_OI, betas[1]), second_OI)
    k = each((updates + usable).clamp(min=1))
    numerator_OI = betas[0] * m_OI / (1 - betas[0] ** (k + 1)) + (1 - betas[0]) * x_OI / (1 - betas[0] ** k)
    return numerator_OI / (torch.sqrt(v_OI / (1 - betas[1] ** k)) + eps), m_OI, v_OI
