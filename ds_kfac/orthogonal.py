"""The orthogonal factor of a direction: all its singular values set to about one, as Muon does.

It has the same size whatever is left of the direction. Where gradients die out Adam's direction does too, and a layer
must not walk on along what rounding and old moments make of it: below :data:`FULL` the factor shrinks with it.

Shape suffixes: O, I the sides of a layer's matrix.
"""

import torch
from torch import Tensor

from ds_kfac.precision import HIGHEST, Precision, fp32_products

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al. 2024, Muon): tuned to lift small singular values fast: to 0.7 .. 1.2."""
FULL = 0.03
"""Root mean square of Adam's direction from which on a step has its full size. In ordinary training it is 0.1 to 0.3
(Adam's steps are signal over noise), in 150 steps of gpt_small and mlm (benchmarks/convergence) never below 0.032."""
SMALLEST = 1e-15
"""A norm below which a matrix is scaled as if it had this one: its squares would be lost, and a quotient blow up."""


def newton_schulz(x_OI: Tensor, *, steps: int = 5, precision: Precision = HIGHEST) -> Tensor:
    """U V^T of x = U S V^T, nearly; of n matrices [n, O, I] at once. In bf16 where ``precision`` has a bf16 half, as
    Muon does it. Cost per step: 4 m^2 n + 2 m^3 FLOPs, with m the shorter and n the longer side."""
    a, b, c = COEFFICIENTS
    tall = x_OI.shape[-2] > x_OI.shape[-1]
    wide = x_OI.mT if tall else x_OI
    wide = wide / norms(wide).clamp(min=SMALLEST)
    wide = wide.bfloat16() if precision.half else wide
    plus = torch.addmm if wide.ndim == 2 else torch.baddbmm  # no passes beside the products
    with fp32_products(precision.into, x_OI.device):
        for _ in range(steps):
            gram = wide @ wide.mT
            wide = plus(wide, plus(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide


def orthogonalized(direction_OI: Tensor, *, rms: float, steps: int = 5, precision: Precision = HIGHEST) -> Tensor:
    """The direction's orthogonal factor, every entry of size ``rms`` on average, less where those of the direction are
    below :data:`FULL`; zero stays zero."""
    factor = newton_schulz(direction_OI, steps=steps, precision=precision).float()
    size = (factor.shape[-2] * factor.shape[-1]) ** 0.5
    worth = (norms(direction_OI) / (FULL * size)).clamp(max=1.0)
    return factor * (rms * size * worth / norms(factor).clamp(min=SMALLEST))


def norms(x_OI: Tensor) -> Tensor:
    """Frobenius norm of each matrix, [.., 1, 1]."""
    return torch.linalg.vector_norm(x_OI, dim=(-2, -1), keepdim=True)
