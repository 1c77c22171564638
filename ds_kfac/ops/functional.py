"""The op vocabulary that the floors above call. Same contracts as ``ops/reference.py``, without its waste.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a layer's matrix.
"""

from functools import cache

import torch
from torch import Tensor

from ds_kfac.ops.reference import eigen_scale, packed_numel

__all__ = ["eigen_scale", "packed_numel", "symmetric_pack", "symmetric_unpack", "syrk_accumulate_"]

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


def syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, ones_column: bool = False) -> Tensor:
    """See :func:`ds_kfac.ops.reference.syrk_accumulate_`. Half the FLOPs of X^T X for large D, no ones column formed.

    Args:
        sum_P: fp32 [P] of side D, or D + 1 with ``ones_column``; added to in place.
        x_ND: [N, D] in any floating dtype; products and sums are in fp32, also under autocast.
    """
    rows, dim = x_ND.shape
    if sum_P.dtype != torch.float32 or sum_P.shape != (packed_numel(dim + ones_column),):
        raise ValueError(
            f"syrk_accumulate_: sum_P must be fp32 of shape ({packed_numel(dim + ones_column)},) for rows of {dim}"
            f"{' and a ones column' if ones_column else ''}, got {sum_P.dtype} {tuple(sum_P.shape)}"
        )
    with torch.autocast(x_ND.device.type, enabled=False):  # autocast would run the product in 16 bits
        x_ND = x_ND.float()
        for start in range(0, dim, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, dim)
            block = x_ND[:, start:stop].T @ x_ND[:, :stop]
            lower = block.reshape(-1).index_select(0, _lower_index(start, stop, x_ND.device))
            sum_P[packed_numel(start) : packed_numel(stop)].add_(lower)
        if ones_column:  # the bias row is the contiguous tail [column sums, N]
            tail = sum_P[packed_numel(dim) :]
            tail[:dim].add_(x_ND.sum(dim=0))
            tail[dim].add_(rows)
    return sum_P
