"""How much is added to the Kronecker eigenvalues before dividing by them."""

from collections.abc import Callable

from torch import Tensor


def tikhonov(value: float, values_G: Tensor, values_A: Tensor) -> Tensor | float:
    """The same lambda for every layer, in units of the Fisher matrix (Martens & Grosse 2015, sec. 6.1)."""
    return value


def relative(value: float, values_G: Tensor, values_A: Tensor) -> Tensor | float:
    """``value`` times the layer's mean Fisher eigenvalue, mean(values_G) mean(values_A): free of the loss's scale."""
    return value * values_G.mean() * values_A.mean()


DAMPING_KINDS: dict[str, Callable[[float, Tensor, Tensor], Tensor | float]] = {
    "tikhonov": tikhonov,
    "relative": relative,
}
