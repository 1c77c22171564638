"""Products of rows with random vectors, and how exact they are: what a proof (``proof.py``) is made of.

Shape suffixes: n groups of a layer, D a side, K probes, P a packed triangle.
"""

import torch
from torch import Tensor

from ds_kfac.curvature.factor import Side
from ds_kfac.ops.dispatch import symmetric_pack_into_

CHUNK = 1 << 22
"""Most elements converted to fp32 at a time."""
TF32 = 2.0**-10
"""Relative accuracy that fp32 products may have on a GPU, and convolutions everywhere: they add up an image's pixels,
which are alike, so that partial sums exceed R. Of a CPU's, 1.6 times what eps_32 allows was seen (a ResNet's stem)."""


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def accuracy(dtype: torch.dtype, device: torch.device, images: bool = False) -> float:
    """Relative accuracy of products, see :data:`TF32`: on a GPU cuDNN's convolutions have it by default."""
    return max(eps_of(dtype), TF32 if images or device.type != "cpu" else 0.0)


def times(x: Tensor, w_DK: Tensor) -> Tensor:
    """Rows [.., D] times w, fp32 [.., K]."""
    rows = max(1, CHUNK // max(1, x.shape[-1]))
    with torch.autocast(x.device.type, enabled=False):
        parts = [part.float() @ w_DK for part in x.detach().reshape(-1, x.shape[-1]).split(rows)]
    return torch.cat(parts).reshape(*x.shape[:-1], w_DK.shape[-1])


def second_moment(side: Side, sum_P: Tensor, w_nDK: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over groups and probes of w^T S w, for a side whose blocks are the groups; and how much it changes if every
    element of S changes by its own size with a random sign. float64 scalars."""
    products_nDD = (w_nDK @ w_nDK.mT).mul_(2.0)  # an element stands for its mirror image, which is not stored
    products_nDD.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    products_P = products_nDD.flatten()
    if products_nDD.shape[-1] > 1:
        products_P = torch.empty_like(sum_P)
        symmetric_pack_into_(products_P, range(0, len(sum_P), len(sum_P) // len(products_nDD)), list(products_nDD))
    moment = products_P.mul_(sum_P).sum(dtype=torch.float64)
    return moment, (2 * w_nDK.shape[-1]) ** 0.5 * torch.linalg.vector_norm(sum_P, dtype=torch.float64)
