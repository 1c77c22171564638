"""The model's mean curvature: what damping of kind "model" is relative to.

    mean = sum over layers of O I mean(beta) mean(alpha)  /  sum over layers of O I

the mean Fisher eigenvalue over all parameters of the layers that have eigenbases. It changes when an eigenbasis
arrives, and is agreed then by one sum of two numbers over all ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.update.layer_state import LayerState


def curvature_sums(
    states: Mapping[str, LayerState], layers: Sequence[LayerSpec], *, workers: int, device: torch.device
) -> Tensor:
    """This rank's part of the two sums, fp32 [2].

    Args:
        layers: of which this rank is a gradient worker.
        workers: of a layer, each of which adds its part.
    """
    total = torch.zeros(2, device=device)
    for layer in layers:
        basis = states[layer.name].basis
        if basis is not None:
            size = layer.numel / (layer.copies * workers)
            mean = basis.G.values.mean() * basis.A.values.mean()
            total += torch.stack([mean, torch.ones_like(mean)]) * size
    return total


def mean_of(sums: Tensor) -> Tensor:
    """From the sums over all ranks."""
    return sums[0] / sums[1].clamp(min=1.0)
