"""Running moments of a layer's gradient in its eigenbasis: corrected eigenvalues, and Adam's state.

Shape suffixes: O, I the sides of the layer's matrix.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.eigenbasis import LayerBasis


def carried(second_OI: Tensor, overlap: LayerBasis) -> Tensor:
    """Second moments in the new basis, were the old coordinates uncorrelated: squares of the overlap on both sides."""
    return overlap.squared().rotate(second_OI)


@dataclass(frozen=True)
class CorrectedEigenvalues:
    """EKFAC (George et al. 2018, arXiv:1806.03884), its running-average form: what replaces beta alpha^T.

    Attributes:
        second_OI: fp32, running average of the squared rotated gradient.
        updates: fp32 scalar on the device, gradients folded in so far.
    """

    second_OI: Tensor
    updates: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], device: torch.device | str = "cpu") -> "CorrectedEigenvalues":
        return cls(torch.zeros(shape, device=device), torch.zeros((), device=device))

    @property
    def nbytes(self) -> int:
        return self.second_OI.nbytes + self.updates.nbytes

    def folded(self, rotated_OI: Tensor, *, decay: float, usable: Tensor) -> "CorrectedEigenvalues":
        """S <- r S + (1 - r) rotated^2 with r = min(1 - 1/updates, decay), as for factors.

        Args:
            usable: bool scalar; where false nothing changes.
        """
        updates = self.updates + usable.to(self.updates.dtype)
        keep = torch.clamp(1 - 1 / updates.clamp(min=1), max=decay)
        second = keep * self.second_OI + (1 - keep) * rotated_OI.square()
        return CorrectedEigenvalues(torch.where(usable, second, self.second_OI), updates)

    def moved(self, overlap: LayerBasis, *, carry: bool) -> "CorrectedEigenvalues":
        """After a refresh: kept as it is, or carried over."""
        return replace(self, second_OI=carried(self.second_OI, overlap)) if carry else self


@dataclass(frozen=True)
class AdamMoments:
    """Adam's state of one layer, in its eigenbasis (SOAP, Vyas et al. 2024, arXiv:2409.11321).

    Attributes:
        first_OI, second_OI: fp32, not bias-corrected.
        updates: fp32 scalar on the device, steps so far.
    """

    first_OI: Tensor
    second_OI: Tensor
    updates: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], device: torch.device | str = "cpu") -> "AdamMoments":
        zeros = torch.zeros(shape, device=device)
        return cls(zeros, zeros, torch.zeros((), device=device))

    @property
    def nbytes(self) -> int:
        return self.first_OI.nbytes + self.second_OI.nbytes + self.updates.nbytes

    def folded(self, rotated_OI: Tensor, *, betas: tuple[float, float], usable: Tensor) -> "AdamMoments":
        """One step's gradient folded into both moments; unchanged where ``usable`` is false."""
        first = torch.lerp(rotated_OI, self.first_OI, betas[0])
        second = torch.lerp(rotated_OI.square(), self.second_OI, betas[1])
        return AdamMoments(
            torch.where(usable, first, self.first_OI),
            torch.where(usable, second, self.second_OI),
            self.updates + usable.to(self.updates.dtype),
        )

    def direction(
        self, rotated_OI: Tensor, *, betas: tuple[float, float], eps: float, nesterov: bool = False
    ) -> Tensor:
        """Adam's step before the learning rate, rotated: first / (sqrt(second) + eps), both bias-corrected.

        Args:
            rotated_OI: the gradient folded in last; with ``nesterov`` it is weighted as the next step's first moment
                will weight it (NAdam, Dozat 2016).
        """
        steps = self.updates.clamp(min=1)
        root = (self.second_OI / (1 - betas[1] ** steps)).sqrt_()
        first = self.first_OI / (1 - betas[0] ** steps)
        if nesterov:
            ahead = self.first_OI * (betas[0] / (1 - betas[0] ** (steps + 1)))
            first = ahead + rotated_OI * ((1 - betas[0]) / (1 - betas[0] ** steps))
        return first.div_(root.add_(eps))

    def moved(self, overlap: LayerBasis, *, carry: bool) -> "AdamMoments":
        """After a refresh: the first moment is rotated into the new basis, the second kept or carried over."""
        second = carried(self.second_OI, overlap) if carry else self.second_OI
        return replace(self, first_OI=overlap.rotate(self.first_OI).contiguous(), second_OI=second)
