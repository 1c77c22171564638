"""The op vocabulary that the floors above call. Same contracts as ``ops/reference.py``, without its waste.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a layer's matrix.
"""

from functools import cache

import torch
from torch import Tensor

from ds_kfac.ops.reference import packed_numel

__all__ = [
    "block_syrk_accumulate_",
    "count_accumulate_",
    "eigen_scale",
    "packed_numel",
    "symmetric_pack",
    "symmetric_unpack",
    "syrk_accumulate_",
]

BLOCK_ROWS = 128
"""Rows of the lower triangle computed by one matrix product; above it, the upper blocks are never computed."""


@cache  # 8 P bytes per distinct side, shared by all ops; rebuilt per call it would cost the product
def _lower_index(start: int, stop: int, device: torch.device) -> Tensor:
    """Where rows start..stop of a lower triangle lie in their row-major [stop - start, stop] block; int64."""
    rows, columns = torch.tril_indices(stop - start, stop, offset=start, device=device)
    return rows * stop + columns


def symmetric_pack(x_DD: Tensor) -> Tensor:
    """See :func:`ds_kfac.ops.reference.symmetric_pack`."""
    if x_DD.ndim != 2 or x_DD.shape[0] != x_DD.shape[1]:
        raise ValueError(f"symmetric_pack: expected a square matrix, got shape {tuple(x_DD.shape)}")
    dim = len(x_DD)
    packed_P = x_DD.new_empty(packed_numel(dim))
    for start in range(0, dim, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, dim)
        block = x_DD[start:stop, :stop].reshape(-1)
        packed_P[packed_numel(start) : packed_numel(stop)] = block.index_select(
            0, _lower_index(start, stop, block.device)
        )
    return packed_P


def symmetric_unpack(x_P: Tensor, *, dim: int) -> Tensor:
    """See :func:`ds_kfac.ops.reference.symmetric_unpack`."""
    if x_P.shape != (packed_numel(dim),):
        raise ValueError(
            f"symmetric_unpack: expected shape ({packed_numel(dim)},) for dim {dim}, got {tuple(x_P.shape)}"
        )
    lower_DD = x_P.new_zeros(dim, dim)
    for start in range(0, dim, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, dim)
        block = x_P.new_zeros((stop - start) * stop)
        block.index_copy_(0, _lower_index(start, stop, x_P.device), x_P[packed_numel(start) : packed_numel(stop)])
        lower_DD[start:stop, :stop] = block.view(stop - start, stop)
    return lower_DD + lower_DD.tril(-1).T


def syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None) -> Tensor:
    """See :func:`ds_kfac.ops.reference.syrk_accumulate_`. Half the FLOPs of X^T X for large D, no wide copy is formed.

    Args:
        sum_P: fp32 [P] of side D, or D + 1 with ``ones_column``; added to in place.
        x_ND: [N, D] in any floating dtype; products and sums are in fp32, also under autocast.
        ones_column: [N, 1] of ones, zero where a row of ``x_ND`` is zero because it does not count.
    """
    dim = x_ND.shape[1]
    ones = ones_column is not None
    if sum_P.dtype != torch.float32 or sum_P.shape != (packed_numel(dim + ones),):
        raise ValueError(
            f"syrk_accumulate_: sum_P must be fp32 of shape ({packed_numel(dim + ones)},) for rows of {dim}"
            f"{' and a ones column' if ones else ''}, got {sum_P.dtype} {tuple(sum_P.shape)}"
        )
    with torch.autocast(x_ND.device.type, enabled=False):  # autocast would run the product in 16 bits
        x_ND = x_ND.float()
        for start in range(0, dim, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, dim)
            block = x_ND[:, start:stop].T @ x_ND[:, :stop]
            lower = block.reshape(-1).index_select(0, _lower_index(start, stop, x_ND.device))
            sum_P[packed_numel(start) : packed_numel(stop)].add_(lower)
        if ones_column is not None:  # the bias row is the contiguous tail [column sums, N]
            tail = sum_P[packed_numel(dim) :]
            tail[:dim].add_(x_ND.sum(dim=0))
            tail[dim].add_(ones_column.sum())
    return sum_P


def block_syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, block: int) -> Tensor:
    """See :func:`ds_kfac.ops.reference.block_syrk_accumulate_`. All blocks in one batched product.

    Args:
        sum_P: fp32 [D / block * block(block+1)/2], contiguous; added to in place.
        x_ND: [N, D] in any floating dtype, D a multiple of ``block``.
    """
    rows, dim = x_ND.shape
    if dim % block or sum_P.shape != (dim // block * packed_numel(block),):
        raise ValueError(
            f"block_syrk_accumulate_: rows of {dim} in blocks of {block} need a sum of shape "
            f"({dim // block * packed_numel(block)},) and a whole number of blocks, got {tuple(sum_P.shape)}"
        )
    if block == 1:
        return sum_P.add_(x_ND.float().square().sum(dim=0))
    with torch.autocast(x_ND.device.type, enabled=False):
        x_nNb = x_ND.float().view(rows, dim // block, block).transpose(0, 1)
        products = (x_nNb.mT @ x_nNb).view(dim // block, -1)
        lower = products.index_select(1, _lower_index(0, block, x_ND.device))
    return sum_P.add_(lower.view(-1))


def count_accumulate_(sum_D: Tensor, index_N: Tensor) -> Tensor:
    """See :func:`ds_kfac.ops.reference.count_accumulate_`. No host synchronisation, unlike bincount on a GPU.

    Args:
        sum_D: fp32 [D]; added to in place.
        index_N: int64 [N], entries below D.
    """
    return sum_D.index_add_(0, index_N.clamp(min=0), (index_N >= 0).to(sum_D.dtype))


def eigen_scale(
    x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Tensor | float, *, exponent: float = 1.0
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.eigen_scale`. The common exponents without a general power."""
    denominators = torch.outer(values_O, values_I) + damping
    if exponent == 1.0:
        return x_OI / denominators
    return x_OI * denominators.rsqrt() if exponent == 0.5 else x_OI / denominators**exponent
