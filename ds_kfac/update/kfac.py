"""Rotate into the eigenbasis, divide, rotate back; kl-clip and grafting. Shape suffixes: O, I a layer's sides.

All take one matrix [O, I] or n of equal shape [n, O, I]; what is a scalar of one is [n] of several.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.ops.dispatch import eigen_scale_dot
from ds_kfac.ops.functional import Scalar
from ds_kfac.update.rotation import Rotation, is_large, norms
from ds_kfac.update.state import CorrectedEigenvalues


def precondition(
    gradient_OI: Tensor,
    rotation: Rotation,
    *,
    damping: float,
    damping_kind: str = "tikhonov",
    damping_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(F + lambda)^-1 applied to a gradient, without forming an inverse; F = Q diag(e) Q^T, e = beta alpha^T.

        V = Q_G [ (Q_G^T gradient Q_A) / (e + lambda) ] Q_A^T

    Linear in the gradient, so a loss scale passes through. Cost: 4 O I (O + I) FLOPs.
    Source: Grosse & Martens 2016 (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020 (2007.00784).

    Args:
        gradient_OI: fp32 [O, I], the bias gradient as last column where the layer has one.
        damping_kind: "tikhonov", in units of the Fisher; "relative" to the layer's mean eigenvalue; "adaptive" to
            ``damping_scale``, and shared out between the factors.

    Returns V and <V, gradient>, which is that of the rotated ones.
    """
    *several, rows, columns = gradient_OI.shape
    beta_O, alpha_I = rotation.values_G.view(*several, rows), rotation.values_A.view(*several, columns)
    # of a layer in groups, whose values are flat, one for all of them
    mean_G, mean_A = rotation.values_G.mean(-1), rotation.values_A.mean(-1)
    lambda_: Scalar
    if damping_kind == "adaptive":
        assert damping_scale is not None
        tiny, root = torch.finfo(torch.float32).tiny, (damping * damping_scale).sqrt()
        pi = (mean_A.clamp(min=tiny) / mean_G.clamp(min=tiny)).sqrt()
        beta_O, alpha_I, lambda_ = beta_O + (root / pi)[..., None], alpha_I + (root * pi)[..., None], 0.0
    else:
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


# Rate and momentum of a step from a quadratic model of the loss, and damping from how well it predicts.
#
#     delta = w_1 d_1 + w_2 d_2         d_1 the K-FAC gradient, d_2 the last delta
#     q(delta) = <b, w> + w^T M w / 2   b_i = <gradient, d_i>,   M_ij = d_i^T F d_j,   F the exact Fisher matrix
#     w = -(M + lambda D)^-1 b          D_ij = <d_i, d_j>
#
#     rho = (loss after the step - loss before it) / q(delta)
#     lambda <- lambda RATE^k where rho > 3/4,  lambda / RATE^k where rho < 1/4          every k steps
#
# Source: Martens & Grosse 2015 (arXiv:1503.05671), sec. 6.4 to 7.


RATE = 0.95
"""By which damping changes, per step."""
BAD, GOOD = 0.25, 0.75
PARALLEL = 1e-6
"""Two directions with a smaller sine squared are taken for one: what differs is rounding."""


@dataclass(frozen=True)
class QuadraticModel:
    """Of one step; float64 on the device.

    Attributes:
        b: [2]
        M, D: [2, 2]
    """

    b: Tensor
    M: Tensor
    D: Tensor

    def weights(self, damping: Tensor) -> Tensor:
        """w [2] of the minimum with damping lambda; w_2 is zero where d_2 is, or adds nothing."""
        damped = self.M + damping.double() * self.D
        (a, c), (_, e) = damped.unbind()[0].unbind(), damped.unbind()[1].unbind()
        determinant = a * e - c * c
        b_1, b_2 = self.b.unbind()
        alone = torch.stack([-b_1 / a, torch.zeros_like(a)])
        both = torch.stack([c * b_2 - e * b_1, c * b_1 - a * b_2]) / determinant
        return torch.where(determinant > PARALLEL * a * e, both, alone)

    def change(self, w: Tensor) -> Tensor:
        """q, the predicted change of the loss by w [2]; without damping."""
        return self.b @ w + w @ self.M @ w / 2


def adapted(damping: Tensor, *, actual: Tensor, predicted: Tensor, steps: int) -> Tensor:
    """The damping after a step that was predicted to change the loss by ``predicted`` and did by ``actual``.

    Args:
        steps: since the last time. A loss that is no number counts as a bad prediction, no step as none.
    """
    rho = torch.nan_to_num(actual / predicted, nan=-torch.inf)
    factor = torch.where(rho > GOOD, RATE**steps, torch.where(rho < BAD, RATE**-steps, 1.0))
    return damping * torch.where(predicted == 0, 1.0, factor).to(damping.dtype)
