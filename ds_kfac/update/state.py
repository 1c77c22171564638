"""What a gradient worker of a layer keeps between steps: what preconditions it, and moments of its gradient there.

Shape suffixes: O, I the sides of the layer's matrix. Of n layers of equal shape at once every tensor has a leading n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.factor import Side, excess
from ds_kfac.curvature.methods import EIGEN, Kept, Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import adam_fold_, adam_scale_, corrected_scale_dot
from ds_kfac.update.rotation import BasisChange, is_large, rows_at_once


class Moments:
    """What an update rule keeps of a layer's gradients: a frozen dataclass of fp32 tensors, each [O, I], those named
    ``_OI``, or a scalar; of a layer in groups [groups, O, I] or [groups].

    Attributes:
        NAME: in checkpoints.
        ROTATES: whether ``rotated`` takes them into a new eigenbasis.
        TOGETHER: whether those of layers that are stepped together are, too.
    """

    NAME: ClassVar[str]
    ROTATES: ClassVar[bool] = False
    TOGETHER: ClassVar[bool] = True

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Any:
        parts = [shape if "_OI" in part.name else shape[:-2] for part in fields(cls)]  # type: ignore[arg-type]
        return cls(*(torch.zeros(own, device=device) for own in parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values())

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
        changes: Sequence[BasisChange | None] = (None,),
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
            changes: of each layer.

        Returns Adam's step with Nesterov's momentum, rotated, before the learning rate; and what brings the gradient
        into the moments.
        """
        # a basis in blocks may leave it transposed, which moments are not
        x_OI = rotated_OI.contiguous()
        rounds = waits is not torch.float32
        waiting_OI, direction_OI = torch.empty_like(x_OI, dtype=waits if rounds else None), x_OI
        if not rounds:
            waiting_OI, direction_OI = direction_OI, waiting_OI
        update = MomentUpdate(self, waiting_OI, usable.expand(self.updates.numel()).contiguous(), betas, changes)
        whole = direction_OI, waiting_OI, x_OI, self.first_OI, self.second_OI
        parts: Any = [[as_several(x) for x in whole]]
        if any(changes) and is_large(x_OI):
            rows = rows_at_once(x_OI)
            direction, waiting, x, _, second = (as_several(x).split(rows, dim=1) for x in whole)
            parts = zip(direction, waiting, x, map(as_several, changes[0].rows(self.first_OI)), second, strict=True)  # type: ignore[union-attr]
        elif any(changes):
            parts[0][3] = as_several(self.rotated(*changes).first_OI)
        for part in parts:
            out, waiting, x, first, second = part
            adam_scale_(
                out, waiting, x, first, second, self.updates.view(-1), update.usable, scale, betas=betas, eps=eps
            )
        return direction_OI, update

    def rotated(self, *changes: BasisChange | None) -> "AdamMoments":
        """After a refresh: the first moment, of each of several layers if it is of several, is rotated into the new
        basis; the second is kept as it is."""
        if not any(changes):
            return self
        parts = self.first_OI.unbind() if len(changes) > 1 else [self.first_OI]
        new = [change(part) if change else part for change, part in zip(changes, parts, strict=True)]
        return replace(self, first_OI=torch.stack(new) if len(changes) > 1 else new[0])

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
        changes: of each layer.
    """

    moments: AdamMoments
    waiting_OI: Tensor
    usable: Tensor
    betas: tuple[float, float]
    changes: Sequence[BasisChange | None]

    def apply(self) -> None:
        """Change the moments, in place; this is given up."""
        first_OI = self.moments.first_OI
        parts = first_OI.unbind() if len(self.changes) > 1 else [first_OI]
        for change, part in zip(self.changes, parts, strict=True):
            if change is not None:
                change(part, part)
        whole = as_several(self.moments.first_OI), as_several(self.moments.second_OI), self.moments.updates.view(-1)
        adam_fold_(*whole, as_several(self.waiting_OI), self.usable, betas=self.betas)


def as_several(x_OI: Tensor) -> Tensor:
    """[n, O, I], of one matrix with n 1; a view."""
    return x_OI if x_OI.ndim > 2 else x_OI[None]


@dataclass(frozen=True)
class LastUpdate(Moments):
    """What a layer's weights were changed by, over the learning rate: the momentum of steps by the quadratic model.

    Attributes:
        update_OI: fp32, in the layer's own coordinates.
    """

    NAME: ClassVar = "update"
    TOGETHER: ClassVar = False

    update_OI: Tensor


@dataclass(frozen=True)
class LayerState:
    """Everything of one layer. A step makes another, which is dropped if it is skipped; moments may be the same, and
    change when the step was applied.

    Attributes:
        terms: fp32 scalar, loss terms of the last captured batch: a mean gradient times its root has the size of a
            single term's.
        method: what ``A`` and ``G`` are.
        A, G: eigenbases, damped inverses or roots; None until the first refresh. Gradients are preconditioned when both
            are there.
        moments: of the rotated gradient; None if the update rule keeps none.
        change: what is to be done to them before they are in the eigenbases; None: nothing.
    """

    terms: Tensor
    method: Method = EIGEN
    A: Kept | None = None
    G: Kept | None = None
    moments: Any = None
    change: BasisChange | None = None

    @classmethod
    def empty(
        cls, layer: LayerSpec, device: torch.device, *, moments: type[Moments] | None = None, method: Method = EIGEN
    ) -> "LayerState":
        """Nothing seen yet; of an identity side it is known what is kept."""

        def known(side: Side) -> Kept | None:
            return None if side.block else method.identity(side, device)

        own = None if moments is None else moments.empty(layer.shape, device)
        return cls(torch.ones((), device=device), method, known(layer.A), known(layer.G), own)

    # once: a state lives from one refresh to the next

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

    def rebased(self, *, A: Kept | None = None, G: Kept | None = None) -> "LayerState":
        """With new eigenbases or inverses of one or both sides; Adam's first moment is to be rotated into the
        eigenbases. Second moments stay as they are."""
        new = replace(self, A=A or self.A, G=G or self.G)
        if new.basis is None or self.moments is None or not self.moments.ROTATES:
            return new
        return replace(new, change=BasisChange(self.change.old if self.change else self.basis, new.basis))

    def settled(self) -> "LayerState":
        """With moments that are in the eigenbases."""
        return self if self.change is None else replace(self, moments=self.moments.rotated(self.change), change=None)

    def without(self, *, A: Kept | None, G: Kept | None) -> "LayerState":
        """With the moments taken out of eigenbases of sides that are identities now; None: of a side that is not."""
        bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
        if not bases or self.moments is None:
            return self
        nothing = Eigenbasis((), bases[0].values)
        undo = LayerBasis(*(basis if isinstance(basis, Eigenbasis) else nothing for basis in (G, A)))
        return replace(self, moments=self.moments.unrotated(undo))
