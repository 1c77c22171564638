"""What a gradient worker of a layer keeps between steps: what preconditions it, and moments of its gradient there.

Shape suffixes: O, I the sides of the layer's matrix. Of n layers of equal shape at once every tensor has a leading n.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.factor import Side, excess
from ds_kfac.curvature.methods import EIGEN, Decomposition, Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import adam_fold_, adam_scale_, corrected_scale_dot
from ds_kfac.update.rotation import is_large, rows_at_once, turn_


class Moments:
    """What an update rule keeps of a layer's gradients: a frozen dataclass of fp32 tensors, each [O, I], those named
    ``_OI``, or a scalar; of a layer in groups [groups, O, I] or [groups].

    Attributes:
        NAME: in checkpoints.
        ROTATES: whether they go with the eigenbasis into a new one.
    """

    NAME: ClassVar[str]
    ROTATES: ClassVar[bool] = False

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Any:
        parts = [shape if "_OI" in part.name else shape[:-2] for part in fields(cls)]  # type: ignore[arg-type]
        return cls(*(torch.zeros(own, device=device) for own in parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values())

    def turn_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """Into a new eigenbasis, in place, what of them :attr:`ROTATES`."""

    def unrotated(self, basis: LayerBasis) -> Any:
        """Out of an eigenbasis that is given up."""
        return self


@dataclass(frozen=True)
class CorrectedEigenvalues(Moments):
    """EKFAC (George et al. 2018, arXiv:1806.03884), its running-average form: what replaces beta alpha^T.

    Attributes:
        second_OI: fp32, running average of the squared rotated gradient.
        updates: fp32 scalar on the device, gradients folded in so far.
    """

    NAME: ClassVar = "corrected"

    second_OI: Tensor
    updates: Tensor

    def divide(
        self,
        rotated_OI: Tensor,
        *,
        norm: Tensor,
        terms: Tensor | float,
        decay: float,
        damping: Callable[[Callable[[], Tensor]], Tensor | float],
    ) -> tuple[Tensor, Tensor, "CorrectedEigenvalues", Tensor]:
        """Fold a gradient in, S <- r S + (1 - r) terms rotated^2 with r = min(1 - 1/updates, decay), as for factors,
        and divide it by the new S + damping, in one pass. As a batch in a factor, a gradient counts in S
        for at most :data:`ds_kfac.curvature.factor.SPIKE` times the average.

        Args:
            rotated_OI: given up: of a large one the quotient takes the place.
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

        def divided(x_OI: Tensor, second_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return corrected_scale_dot(x_OI, second_OI, kept, terms, added)

        kept, added = torch.where(usable, keep, 1.0), damping(mean)
        if not is_large(rotated_OI):
            scaled_OI, second_OI, dot = divided(rotated_OI, self.second_OI)
            return scaled_OI, dot, CorrectedEigenvalues(second_OI, updates), over > 1
        second_OI, rows, dots = torch.empty_like(self.second_OI), rows_at_once(rotated_OI), []
        for out_OI, *parts in zip(*(x.split(rows) for x in (second_OI, rotated_OI, self.second_OI)), strict=True):
            scaled_OI, new_OI, dot = divided(*parts)
            parts[0].copy_(scaled_OI)
            out_OI.copy_(new_OI)
            dots.append(dot)
        return rotated_OI, torch.stack(dots).sum(), CorrectedEigenvalues(second_OI, updates), over > 1

    def unrotated(self, basis: LayerBasis) -> "CorrectedEigenvalues":
        """Out of a basis, as far as a diagonal can be."""
        return replace(self, second_OI=basis.squared().restore(self.second_OI).contiguous())


@dataclass(frozen=True)
class AdamMoments(Moments):
    """Adam's state of one layer, in its eigenbasis (SOAP, Vyas et al. 2024, arXiv:2409.11321).

    Attributes:
        first_OI, second_OI: fp32, not bias-corrected.
        updates: fp32 scalar on the device, steps so far.
    """

    NAME: ClassVar = "adam"
    ROTATES: ClassVar = True

    first_OI: Tensor
    second_OI: Tensor
    updates: Tensor

    def divide(
        self,
        rotated_OI: Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
        usable: Tensor,
        scale: Tensor | float = 1.0,
        waits: torch.dtype = torch.float32,
    ) -> tuple[Tensor, "MomentUpdate"]:
        """Divide as if both moments had one step's gradient in them, first / (sqrt(second) + eps), both
        bias-corrected.

        Args:
            rotated_OI: given up: the update has it, or the direction its place.
            usable: bool scalar on the device, or [n]; where it is false the moments stay as they are, and the
                direction is zero.
            scale: of the gradient.
            waits: what the update's gradient is rounded to until then.

        Returns Adam's step with Nesterov's momentum, rotated, before the learning rate; and what brings the gradient
        into the moments.
        """
        # a basis in blocks may leave it transposed, which moments are not
        x_OI = rotated_OI.contiguous()
        rounds = waits is not torch.float32
        waiting_OI, direction_OI = torch.empty_like(x_OI, dtype=waits if rounds else None), x_OI
        if not rounds:
            waiting_OI, direction_OI = direction_OI, waiting_OI
        update = MomentUpdate(self, waiting_OI, usable.expand(self.updates.numel()).contiguous(), betas)
        out, waiting, x, first, second = (  # [n, O, I]
            part.view(-1, *part.shape[-2:]) for part in (direction_OI, waiting_OI, x_OI, self.first_OI, self.second_OI)
        )
        adam_scale_(out, waiting, x, first, second, self.updates.view(-1), update.usable, scale, betas=betas, eps=eps)
        return direction_OI, update

    def turn_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """The first moment; the second stays as it is."""
        turn_(self.first_OI, old, new)

    def unrotated(self, basis: LayerBasis) -> "AdamMoments":
        """Out of a basis; the second moment as far as a diagonal can be."""
        first, second = basis.restore(self.first_OI), basis.squared().restore(self.second_OI)
        return replace(self, first_OI=first.contiguous(), second_OI=second.contiguous())


@dataclass(frozen=True)
class MomentUpdate:
    """A gradient that Adam's moments will hold once its step was applied. It takes half of what new moments would, or a
    quarter.

    Attributes:
        waiting_OI: the gradient, fp32 or rounded.
        usable: bool [n] of n layers, or the groups of one.
    """

    moments: AdamMoments
    waiting_OI: Tensor
    usable: Tensor
    betas: tuple[float, float]

    def apply(self) -> None:
        """Change the moments, in place; this is given up."""
        first, second, waiting = (
            x.view(-1, *x.shape[-2:]) for x in (self.moments.first_OI, self.moments.second_OI, self.waiting_OI)
        )
        adam_fold_(first, second, self.moments.updates.view(-1), waiting, self.usable, betas=self.betas)


@dataclass(frozen=True)
class LayerState:
    """Everything of one layer. A step makes another, which is dropped if it is skipped; moments may be the same, and
    change when the step was applied.

    Attributes:
        terms: fp32 scalar, loss terms of the last captured batch: a mean gradient times its root has the size of a
            single term's.
        method: what ``A`` and ``G`` are.
        A, G: eigenbases, damped inverses; None until the first refresh. Gradients are preconditioned when both
            are there.
        moments: of the rotated gradient; None if the update rule keeps none.
    """

    terms: Tensor
    method: Method = EIGEN
    A: Decomposition | None = None
    G: Decomposition | None = None
    moments: Any = None

    @classmethod
    def empty(
        cls, layer: LayerSpec, device: torch.device, *, moments: type[Moments] | None = None, method: Method = EIGEN
    ) -> "LayerState":
        """Nothing seen yet; of an identity side it is known what is kept."""

        def known(side: Side) -> Decomposition | None:
            return None if side.block else method.identity(side, device)

        own = None if moments is None else moments.empty(layer.shape, device)
        return cls(torch.ones((), device=device), method, known(layer.A), known(layer.G), own)

    @cached_property
    def preconditioner(self) -> Any:
        """Of the layer, see ``Method.of_layer``; None while a side is missing: gradients pass as they are."""
        return None if self.A is None or self.G is None else self.method.of_layer(self.G, self.A)

    @cached_property
    def basis(self) -> LayerBasis | None:
        """Of the layer's Fisher; None while a side is missing, and with a method that has none."""
        return self.preconditioner if self.method.rotates else None

    @property
    def moments_nbytes(self) -> int:
        return 0 if self.moments is None else self.moments.nbytes

    @property
    def turns(self) -> bool:
        """Whether moments go with the eigenbases."""
        return self.moments is not None and self.moments.ROTATES and self.method.rotates

    def rebased(self, *, A: Decomposition | None = None, G: Decomposition | None = None) -> "LayerState":
        """With new eigenbases or inverses of one or both sides. Adam's first moment is rotated into the eigenbases, in
        place; second moments stay as they are."""
        new = replace(self, A=A or self.A, G=G or self.G)
        if self.turns and new.basis is not None:
            self.moments.turn_(self.basis, new.basis)
        return new

    def without(self, *, A: Decomposition | None, G: Decomposition | None) -> "LayerState":
        """With the moments taken out of eigenbases of sides that are identities now; None: of a side that is not."""
        bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
        if not bases or self.moments is None:
            return self
        nothing = Eigenbasis((), bases[0].values)
        undo = LayerBasis(*(basis if isinstance(basis, Eigenbasis) else nothing for basis in (G, A)))
        return replace(self, moments=self.moments.unrotated(undo))
