"""Rotate into the eigenbasis, divide, rotate back; kl-clip and grafting. Shape suffixes: O, I a layer's sides."""

import torch
from torch import Tensor

from ds_kfac.damping import DAMPING_KINDS
from ds_kfac.eigenbasis import LayerBasis
from ds_kfac.ops.dispatch import eigen_scale


def precondition(
    gradient_OI: Tensor,
    basis: LayerBasis,
    *,
    damping: float,
    damping_kind: str = "tikhonov",
    exponent: float = 1.0,
    eigenvalues_OI: Tensor | None = None,
) -> Tensor:
    """(F + lambda)^-exponent applied to a gradient, without forming an inverse; F = Q diag(e) Q^T.

        V = Q_G [ (Q_G^T gradient Q_A) / (e + lambda)^exponent ] Q_A^T

    Linear in the gradient, so a loss scale passes through. Cost: 4 O I (O + I) FLOPs.
    Source: Grosse & Martens 2016 (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020 (2007.00784).

    Args:
        gradient_OI: fp32 [O, I], the bias gradient as last column where the layer has one.
        exponent: 1 is the natural gradient, 1/2 Adam's (and full-matrix AdaGrad's).
        eigenvalues_OI: corrected eigenvalues e; None takes the Kronecker ones, values_G values_A^T.
    """
    rotated = basis.rotate(gradient_OI)
    if eigenvalues_OI is None:
        mean = basis.G.values.mean() * basis.A.values.mean()
        lambda_ = DAMPING_KINDS[damping_kind](damping, mean)
        scaled = eigen_scale(rotated, basis.G.values, basis.A.values, lambda_, exponent=exponent)
    else:
        lambda_ = DAMPING_KINDS[damping_kind](damping, eigenvalues_OI.mean())
        scaled = rotated / (eigenvalues_OI + lambda_) ** exponent
    return basis.restore(scaled)


def finite_or(preconditioned: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """``preconditioned`` where all of it is finite, else ``otherwise``; and whether it was, a bool scalar.

    ZeRO-1/2 in bf16 would apply a NaN of ours, and an overflowed gradient must reach DeepSpeed's check as it is.
    """
    finite = torch.isfinite(preconditioned).all()
    return torch.where(finite, preconditioned, otherwise), finite


def grafted(preconditioned: Tensor, gradient: Tensor) -> Tensor:
    """The direction of the first at the norm of the second (Anil et al. 2020, arXiv:2002.09018, per layer)."""
    norm = preconditioned.norm()
    return preconditioned * torch.where(norm > 0, gradient.norm() / norm, torch.ones_like(norm))


def kl_clip_scale(quadratic: Tensor, *, kl_clip: float) -> Tensor:
    """nu = min(1, sqrt(kl_clip / quadratic)): bounds the step's KL divergence (Ba et al. 2017, sec. 3).

    Args:
        quadratic: fp32 scalar, the sum over layers of lr^2 <V, gradient>; 0 gives 1.
    """
    nu = torch.sqrt(kl_clip / quadratic.abs()).clamp(max=1.0)
    return torch.where(torch.isfinite(quadratic), nu, torch.ones_like(nu))
