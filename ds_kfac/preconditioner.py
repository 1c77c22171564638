"""Rotate into the eigenbases, divide, rotate back; and kl-clip. Shape suffixes: O, I the sides of a layer's matrix."""

import torch
from torch import Tensor

from ds_kfac.damping import DAMPING_KINDS
from ds_kfac.eigenbasis import Eigenbasis
from ds_kfac.ops.functional import eigen_scale


def precondition(
    gradient_OI: Tensor, basis_G: Eigenbasis, basis_A: Eigenbasis, *, damping: float, damping_kind: str = "tikhonov"
) -> Tensor:
    """(G kron A + lambda)^-1 applied to a gradient, without forming an inverse.

        V = Q_G [ (Q_G^T gradient Q_A) / (values_G values_A^T + lambda) ] Q_A^T

    Linear in the gradient, so a loss scale passes through. Cost: 4 O I (O + I) FLOPs.
    Source: Grosse & Martens 2016 (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020 (2007.00784).

    Args:
        gradient_OI: fp32 [O, I], the bias gradient as last column where the layer has one.
    """
    lambda_ = DAMPING_KINDS[damping_kind](damping, basis_G.values, basis_A.values)
    rotated = basis_G.vectors.T @ gradient_OI @ basis_A.vectors
    rotated = eigen_scale(rotated, basis_G.values, basis_A.values, lambda_)
    return basis_G.vectors @ rotated @ basis_A.vectors.T


def finite_or(preconditioned: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``preconditioned`` where all of it is finite, else ``gradient``; and whether it was, a bool scalar.

    ZeRO-1/2 in bf16 would apply a NaN of ours, and an overflowed gradient must reach DeepSpeed's check as it is.
    """
    finite = torch.isfinite(preconditioned).all()
    return torch.where(finite, preconditioned, gradient), finite


def kl_clip_scale(quadratic: Tensor, *, kl_clip: float) -> Tensor:
    """nu = min(1, sqrt(kl_clip / quadratic)): bounds the step's KL divergence (Ba et al. 2017, sec. 3).

    Args:
        quadratic: fp32 scalar, the sum over layers of lr^2 <V, gradient>; 0 gives 1.
    """
    nu = torch.sqrt(kl_clip / quadratic.abs()).clamp(max=1.0)
    return torch.where(torch.isfinite(quadratic), nu, torch.ones_like(nu))
