"""Running moments of a layer's gradient in its eigenbasis: corrected eigenvalues, and Adam's state.

Shape suffixes: O, I the sides of the layer's matrix. Of n layers of equal shape at once every tensor has a leading n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigenbasis import LayerBasis
from ds_kfac.curvature.factor import excess
from ds_kfac.ops.dispatch import adam_scale, corrected_scale_dot


class Moments(Protocol):
    """What an update rule keeps of a layer's gradients: a frozen dataclass of fp32 tensors, each [O, I] or a scalar;
    of a layer in groups [groups, O, I] or [groups].

    Attributes:
        NAME: in checkpoints.
        COUNT: tensors [O, I].
    """

    NAME: ClassVar[str]
    COUNT: ClassVar[int]

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Any: ...

    @property
    def nbytes(self) -> int: ...

    def moved(self, overlap: LayerBasis) -> Any:
        """Into a new eigenbasis."""

    def unrotated(self, basis: LayerBasis) -> Any:
        """Out of an eigenbasis that is given up."""


@dataclass(frozen=True)
class CorrectedEigenvalues:
    """EKFAC (George et al. 2018, arXiv:1806.03884), its running-average form: what replaces beta alpha^T.

    Attributes:
        second_OI: fp32, running average of the squared rotated gradient.
        updates: fp32 scalar on the device, gradients folded in so far.
    """

    NAME: ClassVar = "corrected"
    COUNT: ClassVar = 1

    second_OI: Tensor
    updates: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> "CorrectedEigenvalues":
        return cls(torch.zeros(shape, device=device), torch.zeros(shape[:-2], device=device))

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
    ) -> tuple[Tensor, Tensor, "CorrectedEigenvalues", Tensor]:
        """Fold a gradient in, S <- r S + (1 - r) terms rotated^2 with r = min(1 - 1/updates, decay), as for factors,
        and divide it by the new S, (S + damping)^exponent, in one pass. As a batch in a factor, a gradient counts in S
        for at most :data:`ds_kfac.curvature.factor.SPIKE` times the average.

        Args:
            norm: of the gradient, rotated or not. Where its square times ``terms`` is not finite nothing changes.
            terms: brings a squared gradient to the units of the Fisher.
            damping: mean eigenvalue, as a function -> what is added to all.

        Returns the quotient, its inner product with ``rotated_OI``, the new state, and whether the gradient was scaled
        down for it, a bool scalar.
        """
        size = terms * norm.square()
        usable = torch.isfinite(size)
        over = excess(size, self.second_OI.sum(dim=(-2, -1)), self.updates)
        terms, size = terms / over, size / over
        updates = self.updates + usable.to(self.updates.dtype)
        keep = torch.clamp(1 - 1 / updates.clamp(min=1), max=decay)

        def mean() -> Tensor:  # of the new S, known before it
            old, count = self.second_OI.mean(dim=(-2, -1)), rotated_OI.shape[-2] * rotated_OI.shape[-1]
            return torch.where(usable, keep * old + (1 - keep) * (size / count), old)

        scaled_OI, second_OI, dot = corrected_scale_dot(
            rotated_OI, self.second_OI, torch.where(usable, keep, 1.0), terms, damping(mean), exponent=exponent
        )
        return scaled_OI, dot, CorrectedEigenvalues(second_OI, updates), over > 1

    def moved(self, overlap: LayerBasis) -> "CorrectedEigenvalues":
        """After a refresh: kept as it is."""
        return self

    def unrotated(self, basis: LayerBasis) -> "CorrectedEigenvalues":
        """Out of a basis, as far as a diagonal can be."""
        return replace(self, second_OI=basis.squared().restore(self.second_OI).contiguous())


@dataclass(frozen=True)
class AdamMoments:
    """Adam's state of one layer, in its eigenbasis (SOAP, Vyas et al. 2024, arXiv:2409.11321).

    Attributes:
        first_OI, second_OI: fp32, not bias-corrected.
        updates: fp32 scalar on the device, steps so far.
    """

    NAME: ClassVar = "adam"
    COUNT: ClassVar = 2

    first_OI: Tensor
    second_OI: Tensor
    updates: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> "AdamMoments":
        zeros = torch.zeros(shape, device=device)
        return cls(zeros, zeros, torch.zeros(shape[:-2], device=device))

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
        return direction_OI, AdamMoments(first_OI, second_OI, self.updates + usable)

    def moved(self, overlap: LayerBasis) -> "AdamMoments":
        """After a refresh: the first moment is rotated into the new basis, the second kept as it is."""
        return replace(self, first_OI=overlap.rotate(self.first_OI).contiguous())

    def unrotated(self, basis: LayerBasis) -> "AdamMoments":
        """Out of a basis; the second moment as far as a diagonal can be."""
        first, second = basis.restore(self.first_OI), basis.squared().restore(self.second_OI)
        return replace(self, first_OI=first.contiguous(), second_OI=second.contiguous())


@dataclass(frozen=True)
class LastUpdate:
    """What a layer's weights were changed by, over the learning rate: the momentum of steps by the quadratic model.

    Attributes:
        update_OI: fp32, in the layer's own coordinates.
    """

    NAME: ClassVar = "update"
    COUNT: ClassVar = 1

    update_OI: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> "LastUpdate":
        return cls(torch.zeros(shape, device=device))

    @property
    def nbytes(self) -> int:
        return self.update_OI.nbytes

    def moved(self, overlap: LayerBasis) -> "LastUpdate":
        return self

    def unrotated(self, basis: LayerBasis) -> "LastUpdate":
        return self


M = TypeVar("M", bound=Moments)


def stacked(moments: Sequence[M]) -> M:
    """Of several layers, as one: what :func:`unstacked` took apart, else a copy."""
    if len(moments) == 1:
        return moments[0]
    return type(moments[0])(*(_stacked(parts) for parts in zip(*(vars(m).values() for m in moments), strict=True)))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    base = parts[0]._base
    if base is not None and len(base) == len(parts):
        views = zip(parts, base.unbind(), strict=True)
        if all(part._base is base and part.is_set_to(view) for part, view in views):
            return base
    return torch.stack(list(parts))


def unstacked(moments: M, count: int) -> list[M]:
    """Inverse of :func:`stacked`; views."""
    if count == 1:
        return [moments]
    return [type(moments)(*parts) for parts in zip(*(part.unbind() for part in vars(moments).values()), strict=True)]
