"""Running moments of a layer's gradient in its eigenbasis: corrected eigenvalues, and Adam's state.

Shape suffixes: O, I the sides of the layer's matrix. Of n layers of equal shape at once every tensor has a leading n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ds_kfac.eigenbasis import LayerBasis
from ds_kfac.ops.dispatch import adam_scale, corrected_scale_dot


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

    def divide(
        self,
        rotated_OI: Tensor,
        *,
        norm: Tensor,
        terms: Tensor | float,
        decay: float,
        damping: Callable[[Callable[[], Tensor]], Tensor | float],
        exponent: float = 1.0,
    ) -> tuple[Tensor, Tensor, "CorrectedEigenvalues"]:
        """Fold a gradient in, S <- r S + (1 - r) terms rotated^2 with r = min(1 - 1/updates, decay), as for factors,
        and divide it by the new S, (S + damping)^exponent, in one pass.

        Args:
            norm: of the gradient, rotated or not. Where its square times ``terms`` is not finite nothing changes.
            terms: brings a squared gradient to the units of the Fisher.
            damping: mean eigenvalue, as a function -> what is added to all.

        Returns the quotient, its inner product with ``rotated_OI``, and the new state.
        """
        size = terms * norm.square()
        usable = torch.isfinite(size)
        updates = self.updates + usable.to(self.updates.dtype)
        keep = torch.clamp(1 - 1 / updates.clamp(min=1), max=decay)

        def mean() -> Tensor:  # of the new S, known before it
            old, count = self.second_OI.mean(dim=(-2, -1)), rotated_OI.shape[-2] * rotated_OI.shape[-1]
            return torch.where(usable, keep * old + (1 - keep) * (size / count), old)

        scaled_OI, second_OI, dots = corrected_scale_dot(
            rotated_OI, self.second_OI, torch.where(usable, keep, 1.0), terms, damping(mean), exponent=exponent
        )
        return scaled_OI, dots[..., 0], CorrectedEigenvalues(second_OI, updates)

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

    def divide(
        self, rotated_OI: Tensor, *, betas: tuple[float, float], eps: float, usable: Tensor, nesterov: bool = False
    ) -> tuple[Tensor, "AdamMoments"]:
        """Fold one step's gradient into both moments and divide, first / (sqrt(second) + eps), both bias-corrected.

        Args:
            usable: bool scalar on the device; where it is false the moments stay as they are.
            nesterov: see :func:`ds_kfac.ops.reference.adam_scale`.

        Returns Adam's step before the learning rate, rotated, and the new state.
        """
        direction_OI, first_OI, second_OI = adam_scale(
            rotated_OI, self.first_OI, self.second_OI, self.updates, usable, betas=betas, eps=eps, nesterov=nesterov
        )
        return direction_OI, AdamMoments(first_OI, second_OI, self.updates + usable.to(self.updates.dtype))

    def moved(self, overlap: LayerBasis, *, carry: bool) -> "AdamMoments":
        """After a refresh: the first moment is rotated into the new basis, the second kept or carried over."""
        second = carried(self.second_OI, overlap) if carry else self.second_OI
        return replace(self, first_OI=overlap.rotate(self.first_OI).contiguous(), second_OI=second)


Moments = TypeVar("Moments", CorrectedEigenvalues, AdamMoments)


def stacked(moments: Sequence[Moments]) -> Moments:
    """Of several layers, as one; a copy, unless it is one layer."""
    if len(moments) == 1:
        return moments[0]
    return type(moments[0])(*(torch.stack(parts) for parts in zip(*(vars(m).values() for m in moments), strict=True)))


def unstacked(moments: Moments, count: int) -> list[Moments]:
    """Inverse of :func:`stacked`; views."""
    if count == 1:
        return [moments]
    return [type(moments)(*parts) for parts in zip(*(part.unbind() for part in vars(moments).values()), strict=True)]
