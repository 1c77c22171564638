"""Adam's step of a layer's matrix in plain torch: part of ``ops/functional.py``.

Shape suffixes: O, I the sides of a layer's matrix.
"""

import torch
from torch import Tensor

from ds_kfac.ops.reference import each


def adam_scale(
    x_OI: Tensor,
    first_OI: Tensor,
    second_OI: Tensor,
    updates: Tensor,
    usable: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`ds_kfac.ops.reference.adam_scale`."""
    m_OI = torch.lerp(x_OI, first_OI, betas[0])
    v_OI = torch.lerp(x_OI.square(), second_OI, betas[1])
    torch.where(each(usable), m_OI, first_OI, out=m_OI)
    torch.where(each(usable), v_OI, second_OI, out=v_OI)
    k = each((updates + usable).clamp(min=1))
    power = betas[0] ** k
    correction = 1 - power
    if nesterov:
        numerator_OI = m_OI * (betas[0] / (1 - betas[0] * power)) + x_OI * ((1 - betas[0]) / correction)
    else:
        numerator_OI = m_OI / correction
    return numerator_OI.div_((v_OI / (1 - betas[1] ** k)).sqrt_().add_(eps)), m_OI, v_OI
