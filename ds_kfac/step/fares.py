"""How training fares: numbers for a framework's logs, of this rank. They read device scalars: at logged steps only."""

from typing import Any

import torch
from torch import Tensor

from ds_kfac.step.preconditioner import KFACPreconditioner


def fares(kfac: KFACPreconditioner) -> dict[str, float]:
    """What is known of:

    - "step_to_weight": size of the last step along KFACAdamW's directions over that of the weights of its layers, root
      mean squares; at ZeRO-3 of the weights that this rank holds.
    - "eigenvalue_spread": largest eigenvalue of an A over their mean, the median of this rank's layers. 1: curvature
      says nothing there.
    """
    found = {}
    if kfac.direction.last is not None:
        squared, lr = kfac.direction.last
        own = [x for p in kfac.layout.params if (x := held(p, kfac.rank)).numel()]
        weight = sum(norm.double().square() for norm in torch._foreach_norm(own)) / sum(x.numel() for x in own)
        step = squared.double() / sum(layer.numel for layer in kfac.layers)
        found["step_to_weight"] = float(lr) * float((step / torch.as_tensor(weight).to(step)).sqrt())
    spreads = [spread(state.basis.A.values) for state in kfac.state.values() if state.basis and state.basis.A.vectors]
    if spreads:
        found["eigenvalue_spread"] = float(torch.stack(spreads).median())
    return found


def held(parameter: Any, rank: int) -> Tensor:
    """What a rank has of a parameter: all, or at ZeRO-3 its chunk without what fills it up, which nobody wrote."""
    chunk = getattr(parameter, "ds_tensor", None)
    if chunk is None:
        return parameter.detach()
    return chunk.detach().flatten()[: max(0, parameter.ds_numel - rank * chunk.numel())]


def spread(values: Tensor) -> Tensor:
    """Largest over mean, of eigenvalues [D]."""
    return values.max() / values.mean()
