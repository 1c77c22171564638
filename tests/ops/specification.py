"""Every op in plain torch, written to be read: what ``ds_kfac/ops/functional.py``, which has the
docstrings, and all other backends are tested against, in float64 (tests/ops/calls.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops.functional import SMALLEST, Scalar, Tensors, in_fp32, packed_numel


def per_matrix(value: Scalar) -> Any:
    """A number, or a tensor [] or [n], shaped to broadcast with a matrix [O, I] or with n matrices
    [n, O, I]."""
    return value[..., None, None] if isinstance(value, Tensor) else value


def symmetric_pack(x_DD: Tensor) -> Tensor:
    """Lower triangle of ``x_DD``, row by row: element (r, c) lies at r(r+1)/2 + c. Returns [P]."""
    rows, columns = torch.tril_indices(*x_DD.shape, device=x_DD.device)
    return x_DD[rows, columns]


def symmetric_unpack(x_P: Tensor, *, dim: int) -> Tensor:
    """The symmetric [D, D] matrix whose lower triangle is ``x_P``; inverse of
    :func:`symmetric_pack`."""
    x_DD = x_P.new_zeros(dim, dim)
    rows, columns = torch.tril_indices(dim, dim, device=x_P.device)
    x_DD[rows, columns] = x_P
    x_DD[columns, rows] = x_P
    return x_DD


def symmetric_pack_into_(out: Tensor, starts: Sequence[int], matrices_DD: Tensors) -> None:
    for start, x_DD in zip(starts, matrices_DD, strict=True):
        packed_P = symmetric_pack(x_DD)
        out[start : start + len(packed_P)] = packed_P.to(out.dtype)


def symmetric_unpack_from(
    packed: Tensor, starts: Sequence[int], dims: Sequence[int]
) -> list[Tensor]:
    return [
        symmetric_unpack(packed[start : start + packed_numel(dim)].float(), dim=dim)
        for start, dim in zip(starts, dims, strict=True)
    ]


def ema_update_(
    averages_P: Tensors, sums_P: Tensors, counts: Tensors, updates: Tensors, decays: Sequence[float]
) -> Tensor:
    used = []
    for average_P, sum_P, count, update, decay in zip(
        averages_P, sums_P, counts, updates, decays, strict=True
    ):
        usable = (count > 0) & torch.isfinite(sum_P).all()
        update += usable
        keep = torch.clamp(1 - 1 / update.clamp(min=1), max=decay)
        new_P = keep * average_P + (1 - keep) * (sum_P / count.clamp(min=1))
        average_P.copy_(torch.where(usable, new_P, average_P))
        used.append(usable)
    return torch.stack(used)


def syrk_accumulate_(
    sum_P: Tensor,
    x_ND: Tensor,
    *,
    kept: Tensor | None = None,
    bias: bool = False,
    scale: Scalar = 1.0,
) -> Tensor:
    if kept is not None:
        x_ND = x_ND[kept]
    if bias:
        x_ND = torch.cat([x_ND, torch.ones_like(x_ND[:, :1])], dim=1)
    return sum_P.add_(scale * symmetric_pack(x_ND.T @ x_ND))


def block_syrk_accumulate_(
    sum_P: Tensor, x_ND: Tensor, *, block: int, kept: Tensor | None = None, scale: Scalar = 1.0
) -> Tensor:
    if kept is not None:
        x_ND = x_ND[kept]
    triangles = [symmetric_pack(part.T @ part) for part in x_ND.split(block, dim=1)]
    return sum_P.add_(scale * torch.cat(triangles))


def adam_step_(
    direction_nOI: Tensor,
    x_nOI: Tensor,
    first_nOI: Tensor,
    second_nOI: Tensor,
    updates_n: Tensor,
    usable_n: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    beta1, beta2 = in_fp32(betas)
    usable_n11 = per_matrix(usable_n)
    m_nOI = torch.lerp(x_nOI, first_nOI, beta1)
    v_nOI = torch.lerp(x_nOI.square(), second_nOI, beta2)
    k = per_matrix(updates_n + 1)
    numerator_nOI = beta1 * m_nOI / (1 - beta1 ** (k + 1)) + (1 - beta1) * x_nOI / (1 - beta1**k)
    quotient_nOI = numerator_nOI / (torch.sqrt(v_nOI / (1 - beta2**k)) + eps)
    direction_nOI.copy_(torch.where(usable_n11, quotient_nOI, 0.0))
    first_nOI.copy_(torch.where(usable_n11, m_nOI, first_nOI))
    second_nOI.copy_(torch.where(usable_n11, v_nOI, second_nOI))
    updates_n.add_(usable_n)


def finish_direction_(
    out_nOI: Tensor,
    x_nOI: Tensor,
    norm_n: Tensor,
    size_n: Tensor | None,
    target_n: Tensor,
    full_n: Tensor,
    used_n: Tensor,
) -> None:
    scale_n = target_n
    if size_n is not None:
        scale_n = target_n * torch.clamp(size_n / full_n, max=1) / torch.clamp(norm_n, min=SMALLEST)
    written_n = used_n & torch.isfinite(norm_n)
    y_nOI = torch.where(per_matrix(written_n), per_matrix(scale_n) * x_nOI, 0.0)
    out_nOI.copy_(y_nOI.view(out_nOI.shape))
