"""EKFAC's eigenvalues: second moments of gradients in the eigenbasis, in a second pass over the data.

    per token       E over rows n of       (Q_G^T g_n a_n^T Q_A)^2 = (Q_G^T g_n)^2 (Q_A^T a_n)^2 ^T
    per sequence    E over sequences of    (sum over its rows of Q_G^T g_n a_n^T Q_A)^2

George et al. 2018 (arXiv:1806.03884), Grosse et al. 2023 (arXiv:2308.03296). Shape suffixes: N
sequences, T positions, O and I the sides of a layer's matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.model.calls import Call
from ds_kfac.model.rows import kept_rows, pairs
from ds_kfac.ops.functional import block_product

CHUNK = 1 << 26
"""Most elements of sequences' gradients at a time (256 MB), unless one sequence has more."""


@torch.no_grad()
def squares(
    calls: Sequence[tuple[Call, Tensor]], basis: LayerBasis, sequences: int, gain: Tensor
) -> Tensor:
    """A layer's sums over rows and over sequences, fp32 [2, O, I]. The second is NaN unless the
    first dimension of every call is the batch's ``sequences``, as of a flattened input or an expert.

    Args:
        calls: (call, gradient of its output).
        gain: factor from these gradients to those of the loss's terms.
    """
    xs, gs = [], []
    for call, gradient in calls:
        x = call.input_rows(call.kept.saved_tensors[0])
        g = call.gradient_rows(gradient)
        kept = gradient.any() if call.kind.images else kept_rows(x, g, call.mask)
        x_NTI, g_NTO = pairs(call, x, g, kept)
        xs.append(_rotated(x_NTI, basis.A.vectors))
        gs.append(_rotated(g_NTO * gain, basis.G.vectors))
    token = sum(g.square().flatten(0, 1).mT @ x.square().flatten(0, 1) for x, g in zip(xs, gs))
    if any(len(x) != sequences for x in xs) or any(call.select is not None for call, _ in calls):
        return torch.stack([token, torch.full_like(token, torch.nan)])
    x_NTI, g_NTO, sequence = torch.cat(xs, dim=1), torch.cat(gs, dim=1), torch.zeros_like(token)
    step = max(1, CHUNK // token.numel())
    for x, g in zip(x_NTI.split(step), g_NTO.split(step), strict=True):
        sequence += (g.mT @ x).square_().sum(dim=0)
    return torch.stack([token, sequence])


def _rotated(rows: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    return block_product([], rows.reshape(-1, rows.shape[-1]), vectors).view(rows.shape)
