"""Rate and momentum of a step from a quadratic model of the loss, and damping from how well it predicts.

    delta = w_1 d_1 + w_2 d_2         d_1 the K-FAC gradient, d_2 the last delta
    q(delta) = <b, w> + w^T M w / 2   b_i = <gradient, d_i>,   M_ij = d_i^T F d_j,   F the exact Fisher matrix
    w = -(M + lambda D)^-1 b          D_ij = <d_i, d_j>

    rho = (loss after the step - loss before it) / q(delta)
    lambda <- lambda RATE^k where rho > 3/4,  lambda / RATE^k where rho < 1/4          every k steps

Source: Martens & Grosse 2015 (arXiv:1503.05671), sec. 6.4 to 7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
