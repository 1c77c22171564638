"""Newton-Schulz of one direction by itself."""

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Precision
from ds_kfac.update.newton_schulz import orthogonal_factors


def newton_schulz(x_OI: Tensor, *, precision: Precision = HIGHEST) -> Tensor:
    """:func:`orthogonal_factors` of one direction [O, I] or [n, O, I], which stays as it is."""
    factor = x_OI.clone(memory_format=torch.contiguous_format)
    orthogonal_factors([factor.view(-1, *x_OI.shape[-2:])], precision=precision)
    return factor
