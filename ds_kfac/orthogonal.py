"""The orthogonal factor of a direction: all its singular values set to about one, as Muon does.

Shape suffixes: O, I the sides of a layer's matrix.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al. 2024, Muon): tuned to lift small singular values fast: to 0.7 .. 1.2."""


def newton_schulz(x_OI: Tensor, *, steps: int = 5) -> Tensor:
    """U V^T of x = U S V^T, nearly. Cost per step: 4 m^2 n + 2 m^3 FLOPs, with m the shorter and n the longer side."""
    a, b, c = COEFFICIENTS
    wide = x_OI.T if x_OI.shape[0] > x_OI.shape[1] else x_OI
    wide = wide / wide.norm().clamp(min=torch.finfo(torch.float32).tiny)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if x_OI.shape[0] > x_OI.shape[1] else wide


def orthogonalized(direction_OI: Tensor, *, rms: float, steps: int = 5) -> Tensor:
    """The direction's orthogonal factor, every entry of size ``rms`` on average; zero stays zero."""
    factor = newton_schulz(direction_OI, steps=steps)
    size = rms * factor.numel() ** 0.5
    return factor * (size / factor.norm().clamp(min=torch.finfo(torch.float32).tiny))
