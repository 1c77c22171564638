"""How much is added to the Fisher's eigenvalues before dividing by them, or to its factors before inverting them.

The mean of the eigenvalues is computed only if it is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Scalar = Tensor | float
Mean = Callable[[], Tensor]


def tikhonov(value: Scalar, mean_eigenvalue: Mean, model_mean: Tensor | None) -> Scalar:
    """The same lambda for every layer, in units of the Fisher matrix (Martens & Grosse 2015, sec. 6.1)."""
    return value


def relative(value: Scalar, mean_eigenvalue: Mean, model_mean: Tensor | None) -> Scalar:
    """``value`` times the layer's mean Fisher eigenvalue: free of the loss's scale."""
    return value * mean_eigenvalue()


def floored(value: Scalar, mean_eigenvalue: Mean, model_mean: Tensor | None) -> Scalar:
    """``value`` times the larger of the layer's mean Fisher eigenvalue and the model's: a layer without a gradient, of
    which the layer's own mean knows no size, takes a step no larger than others."""
    assert model_mean is not None
    return value * torch.maximum(mean_eigenvalue(), model_mean)


DAMPING_KINDS: dict[str, Callable[[Scalar, Mean, Tensor | None], Scalar]] = {
    "tikhonov": tikhonov,
    "relative": relative,
    "model": floored,
}


def factored_tikhonov(value: float, mean: Scalar, partner: Scalar) -> Scalar:
    """sqrt(value) shared out between a layer's factors by pi = sqrt(mean(A) / mean(G)): what is added to a factor.

    A gets pi sqrt(value), G sqrt(value) / pi; seen from either that is sqrt(value * its mean / its partner's).

    Args:
        mean, partner: of the diagonal of this factor and of the layer's other one.

    Source: Martens & Grosse 2015 (arXiv:1503.05671), sec. 6.3, with the trace norm.
    """
    return (value * mean / partner) ** 0.5


def factored_relative(value: float, mean: Scalar, partner: Scalar) -> Scalar:
    """The same with lambda = value mean(A) mean(G): the partner's mean cancels, so a factor needs itself only."""
    return value**0.5 * mean


def factored(value: Tensor, mean_G: Tensor, mean_A: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`factored_tikhonov` adds to the eigenvalues of G and of A, for both eigenbases at once."""
    tiny = torch.finfo(torch.float32).tiny
    pi = (mean_A.clamp(min=tiny) / mean_G.clamp(min=tiny)).sqrt()
    return value.sqrt() / pi, value.sqrt() * pi


FACTORED_DAMPING: dict[str, Callable[[float, Scalar, Scalar], Scalar]] = {
    "tikhonov": factored_tikhonov,
    "relative": factored_relative,
}
