"""Rotate into the eigenbasis, divide, rotate back; kl-clip and grafting. Shape suffixes: O, I a layer's sides.

All take one matrix [O, I] or n of equal shape [n, O, I]; what is a scalar of one is [n] of several.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ds_kfac.ops.dispatch import eigen_scale_dot
from ds_kfac.update.rotation import Rotation, is_large, norms
from ds_kfac.update.state import CorrectedEigenvalues


def precondition(
    gradient_OI: Tensor,
    rotation: Rotation,
    *,
    damping: float,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor]:
    """(F + lambda)^-1 applied to a gradient, without forming an inverse; F = Q diag(e) Q^T, e = beta alpha^T.

        V = Q_G [ (Q_G^T gradient Q_A) / (e + lambda) ] Q_A^T

    Linear in the gradient, so a loss scale passes through. Cost: 4 O I (O + I) FLOPs.
    Source: Grosse & Martens 2016 (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020 (2007.00784).

    Args:
        gradient_OI: fp32 [O, I], the bias gradient as last column where the layer has one.
        damping_kind: "tikhonov", in units of the Fisher; "relative" to the layer's mean eigenvalue.

    Returns V and <V, gradient>, which is that of the rotated ones.
    """
    *several, rows, columns = gradient_OI.shape
    beta_O, alpha_I = rotation.values_G.view(*several, rows), rotation.values_A.view(*several, columns)
    # of a layer in groups, whose values are flat, one for all of them
    mean_G, mean_A = rotation.values_G.mean(-1), rotation.values_A.mean(-1)
    lambda_ = damping if damping_kind == "tikhonov" else damping * mean_G * mean_A
    rotated_OI = _rotated(rotation, gradient_OI)
    scaled_OI, dot = eigen_scale_dot(rotated_OI, beta_O, alpha_I, lambda_)
    return rotation.restore(scaled_OI, given_up=True), dot


def precondition_corrected(
    gradient_OI: Tensor,
    rotation: Rotation,
    corrected: CorrectedEigenvalues,
    *,
    norm: Tensor,
    terms: Tensor | float,
    decay: float,
    damping: float,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor, CorrectedEigenvalues, Tensor]:
    """:func:`precondition` with the running second moment of the rotated gradient, this one included, as e.

    Args:
        norm: of the gradient.
        terms: brings a squared gradient to the Fisher's units: loss terms over the squared loss scale.
        decay: of the second moment.

    Returns V, <V, gradient>, the new second moment, and whether the gradient was scaled down for it.
    """
    in_groups = rotation.values_G.ndim < gradient_OI.ndim - 1

    def damp(mean: Callable[[], Tensor]) -> Tensor | float:
        if damping_kind == "tikhonov":
            return damping
        return damping * (mean().mean() if in_groups else mean())

    scaled_OI, dot, corrected, limited = corrected.divide(
        _rotated(rotation, gradient_OI), norm=norm, terms=terms, decay=decay, damping=damp
    )
    return rotation.restore(scaled_OI, given_up=True), dot, corrected, limited


def _rotated(rotation: Rotation, gradient_OI: Tensor) -> Tensor:
    """A large one whose rows stay apart in one copy."""
    by_rows = is_large(gradient_OI) and not rotation.G
    return rotation.rotate(gradient_OI.clone() if by_rows else gradient_OI, given_up=by_rows)


def finite_or(preconditioned_OI: Tensor, otherwise_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``preconditioned``, which is given up, where all of a matrix is finite, else ``otherwise``, fp32; and whether it
    was, a bool scalar.

    ZeRO-1/2 in bf16 would apply a NaN of ours, and an overflowed gradient must reach DeepSpeed's check as it is.
    """
    found_OI = preconditioned_OI.float()
    finite = torch.isfinite(torch.linalg.vector_norm(found_OI, ord=torch.inf, dim=(-2, -1)))  # without a mask
    return torch.where(finite[..., None, None], found_OI, otherwise_OI, out=found_OI), finite


def graft_scale(preconditioned_OI: Tensor, norm: Tensor) -> Tensor:
    """What gives a direction a norm, such as the gradient's (Anil et al. 2020, arXiv:2002.09018, per layer)."""
    own = norms(preconditioned_OI.flatten(-2)).to(norm.dtype)
    return torch.where(own > 0, norm / own, torch.ones_like(own))


def kl_clip_scale(quadratic: Tensor, *, kl_clip: float) -> Tensor:
    """nu = min(1, sqrt(kl_clip / quadratic)): bounds the step's KL divergence (Ba et al. 2017, sec. 3).

    Args:
        quadratic: fp32 scalar, the sum over layers of lr^2 <V, gradient>; 0 gives 1, and so does what is no number,
            which DeepSpeed's overflow check has to find. More than fp32 holds gives 0: no step is too small for it.
    """
    nu = torch.sqrt(kl_clip / quadratic.abs()).clamp(max=1.0)
    return torch.where(torch.isnan(quadratic), torch.ones_like(nu), nu)
