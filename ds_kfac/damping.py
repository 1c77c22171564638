"""How much is added to the Fisher's eigenvalues before dividing by them. Their mean is computed only if it is used."""

from collections.abc import Callable

from torch import Tensor


def tikhonov(value: float, mean_eigenvalue: Callable[[], Tensor]) -> Tensor | float:
    """The same lambda for every layer, in units of the Fisher matrix (Martens & Grosse 2015, sec. 6.1)."""
    return value


def relative(value: float, mean_eigenvalue: Callable[[], Tensor]) -> Tensor | float:
    """``value`` times the layer's mean Fisher eigenvalue: free of the loss's scale."""
    return value * mean_eigenvalue()


DAMPING_KINDS: dict[str, Callable[[float, Callable[[], Tensor]], Tensor | float]] = {
    "tikhonov": tikhonov,
    "relative": relative,
}
