"""Every op in plain torch, written to be read: the specification that faster backends are tested against.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a layer's matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.ops.functional import SMALLEST, Scalar, Tensors, in_fp32, packed_numel, per_matrix


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
    """Write the lower triangles of several fp32 matrices into one flat tensor, in its dtype (fp32, bf16, fp16).

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
    """Fold one batch into the running averages of several factors, in place.

        average <- r average + (1 - r) sum / max(count, 1)    with r = min(1 - 1/updates, decay), updates <- updates + 1

    A factor keeps its average and ``updates`` if its count is 0 or its sum is not finite. All tensors are fp32.

    Returns bool [n]: whether each factor's sum was used.
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

    Args:
        ones_column: [N, 1]; the input of a layer's bias. An entry is 1, or 0 for a row of zeros that does not count.
        scale: a number, or a 0-d tensor on the device, so that the host does not wait for its value. It is applied
            after the product: 16-bit rows are then not rounded again.
    """
    x_ND = x_ND.float()
    if ones_column is not None:
        x_ND = torch.cat([x_ND, ones_column.float()], dim=1)
    return sum_P.add_(scale * symmetric_pack(x_ND.T @ x_ND))


def block_syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, block: int, scale: Scalar = 1.0) -> Tensor:
    """Add ``scale`` times the diagonal blocks of X^T X to a fp32 sum of their packed triangles, one after the other."""
    triangles = [symmetric_pack(part.T @ part) for part in x_ND.float().split(block, dim=1)]
    return sum_P.add_(scale * torch.cat(triangles))


def adam_scale_(
    direction_nOI: Tensor, waiting_nOI: Tensor, x_nOI: Tensor, first_nOI: Tensor, second_nOI: Tensor,
    updates_n: Tensor, usable_n: Tensor, scale: Scalar = 1.0, *, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Adam's direction, with Nesterov's momentum, for n matrices of one shape; the moments do not change.

    With y = scale x and k = updates + 1:

        m = b1 first + (1 - b1) y        v = b2 second + (1 - b2) y^2
        direction = (b1 m / (1 - b1^(k + 1)) + (1 - b1) y / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)

    y has the weight that it will have in the next step's m (NAdam, Dozat 2016).

    Args:
        direction_nOI: fp32, overwritten; zeros for a matrix that is not usable. It may be ``x_nOI``.
        waiting_nOI: overwritten by y in its dtype, for :func:`adam_fold_`; zeros likewise. It may be ``x_nOI``.
        first_nOI, second_nOI: fp32, the moments so far, without bias correction; not changed.
        updates_n: fp32, how many gradients the moments hold.
        usable_n: bool; where it is False, x is ignored, even NaN.
        betas: rounded to fp32 first.

    Source: Kingma & Ba 2015 (arXiv:1412.6980).
    """
    betas = in_fp32(betas)
    y_nOI = torch.where(per_matrix(usable_n), scale * x_nOI, 0.0)
    m_nOI, v_nOI = torch.lerp(y_nOI, first_nOI, betas[0]), torch.lerp(y_nOI.square(), second_nOI, betas[1])
    k = per_matrix(updates_n + 1)
    numerator_nOI = betas[0] * m_nOI / (1 - betas[0] ** (k + 1)) + (1 - betas[0]) * y_nOI / (1 - betas[0] ** k)
    quotient_nOI = numerator_nOI / (torch.sqrt(v_nOI / (1 - betas[1] ** k)) + eps)
    waiting_nOI.copy_(y_nOI)
    direction_nOI.copy_(torch.where(per_matrix(usable_n), quotient_nOI, 0.0))


def adam_fold_(
    first_nOI: Tensor, second_nOI: Tensor, updates_n: Tensor, waiting_nOI: Tensor, usable_n: Tensor, *,
    betas: tuple[float, float],
) -> None:  # fmt: skip
    """Fold the gradient that :func:`adam_scale_` left in ``waiting_nOI`` into the moments of the usable matrices, and
    add 1 to their ``updates``, in place."""
    y_nOI, betas, usable_n11 = waiting_nOI.float(), in_fp32(betas), per_matrix(usable_n)
    first_nOI.copy_(torch.where(usable_n11, torch.lerp(y_nOI, first_nOI, betas[0]), first_nOI))
    second_nOI.copy_(torch.where(usable_n11, torch.lerp(y_nOI.square(), second_nOI, betas[1]), second_nOI))
    updates_n.add_(usable_n)


def finish_direction_(
    x_nOI: Tensor, norm_n: Tensor, size_n: Tensor | None, target_n: Tensor, full_n: Tensor, bound_n: Tensor,
    replacement_n: Tensor, shift: float,
) -> None:  # fmt: skip
    """Scale n directions to their final norm, in place; replace those that must not be used by a number.

        scale = target min(size / full, 1) / max(norm, SMALLEST)        or target, where size is None
        x <- scale x + shift   where norm < bound, else replacement

    Args:
        x_nOI: fp32.
        norm_n: fp32, the Frobenius norms of x.
        size_n: fp32, the norms of the directions before they were orthogonalized; None: they were not.
        target_n: fp32, the final norms; if ``size_n`` is None, factors.
        full_n: fp32, directions with a ``size_n`` of at least this get the whole target; unused if that is None.
        bound_n: fp32, infinity for a direction that may be used, else 0. NaN is below neither.
        replacement_n: fp32, written to every entry, whatever x holds (also NaN).
        shift: a number, not a tensor.
    """
    scale_n = target_n
    if size_n is not None:
        scale_n = target_n * torch.clamp(size_n / full_n, max=1) / torch.clamp(norm_n, min=SMALLEST)
    scaled_nOI = per_matrix(scale_n) * x_nOI + shift
    x_nOI.copy_(torch.where(per_matrix(norm_n < bound_n), scaled_nOI, per_matrix(replacement_n)))
