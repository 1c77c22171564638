"""What a gradient worker of a layer keeps between steps: what preconditions it, and moments of its gradient there.

Shape suffixes: O, I the sides of the layer's matrix. Of n layers of equal shape at once every tensor has a leading n.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis, Precision
from ds_kfac.curvature.factor import Side, excess
from ds_kfac.curvature.methods import EIGEN, Kept, Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import adam_fold_, adam_scale_, corrected_scale_dot
from ds_kfac.update.rotation import Rotation, batches, is_large, rows_at_once, turn_


class Moments:
    """What an update rule keeps of a layer's gradients: a frozen dataclass of fp32 tensors, each [O, I], those named
    ``_OI``, or a scalar; of a layer in groups [groups, O, I] or [groups].

    Attributes:
        NAME: in checkpoints.
        ROTATES: whether they go with the eigenbasis into a new one.
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
    A: Kept | None = None
    G: Kept | None = None
    moments: Any = None

    @classmethod
    def empty(
        cls, layer: LayerSpec, device: torch.device, *, moments: type[Moments] | None = None, method: Method = EIGEN
    ) -> "LayerState":
        """Nothing seen yet; of an identity side it is known what is kept."""

        def known(side: Side) -> Kept | None:
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

    def rebased(self, *, A: Kept | None = None, G: Kept | None = None) -> "LayerState":
        """With new eigenbases or inverses of one or both sides. Adam's first moment is rotated into the eigenbases, in
        place; second moments stay as they are."""
        new = replace(self, A=A or self.A, G=G or self.G)
        if self.turns and new.basis is not None:
            self.moments.turn_(self.basis, new.basis)
        return new

    def without(self, *, A: Kept | None, G: Kept | None) -> "LayerState":
        """With the moments taken out of eigenbases of sides that are identities now; None: of a side that is not."""
        bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
        if not bases or self.moments is None:
            return self
        nothing = Eigenbasis((), bases[0].values)
        undo = LayerBasis(*(basis if isinstance(basis, Eigenbasis) else nothing for basis in (G, A)))
        return replace(self, moments=self.moments.unrotated(undo))


class Group:
    """Layers of one shape that are stepped together: what they keep lies in one tensor each, [n, ..], of which a
    layer's state is a slice. A layer alone is a group of one, whose matrix stays [O, I] and whose state stays as it is:
    a batch of one is slower than none.

    Attributes:
        layers, names: the layers.
        rotation: into their eigenbases; None until all have one, and with a method that has none.
        moments: of all, each [n, ..]; of one layer its own.
    """

    def __init__(self, layers: Sequence[LayerSpec], precision: Precision = HIGHEST) -> None:
        self.layers, self.names, self.precision = tuple(layers), tuple(layer.name for layer in layers), precision
        self.rotation: Rotation | None = None
        self.moments: Any = None
        self._sides: tuple[Eigenbasis, ...] = ()
        self._slices: list[Any] = []

    def take(self, states: dict[str, LayerState]) -> list[LayerState]:
        """The layers' states, which what the group keeps follows: slices of it take the place of what is none, after a
        refresh eigenbases, after a load moments too. Then there is nothing twice, once the step was applied."""
        own = [states[name] for name in self.names]
        moments = [state.moments for state in own]
        if len(own) == 1:
            self.moments = moments[0]
        elif moments[0] is not None and moments[0].TOGETHER and [*map(id, moments)] != [*map(id, self._slices)]:
            self.moments, self._slices = None, []  # their memory first
            kept = zip(*(vars(one).values() for one in moments), strict=True)
            own = self.keep(states, type(moments[0])(*(torch.stack(parts) for parts in kept)))
        bases = [basis for state in own if (basis := state.basis)]
        sides = tuple(side for basis in bases for side in (basis.G, basis.A))
        if len(bases) < len(own):
            self.rotation, self._sides = None, ()
        elif [*map(id, sides)] != [*map(id, self._sides)]:
            self.rotation, self._sides = None, ()
            self.rotation = turn = Rotation.of(bases, self.precision)
            if len(own) > 1:
                halves = ((turn.G, turn.values_G), (turn.A, turn.values_A))
                pairs = [[_slice(*half, index) for half in halves] for index in range(len(own))]
                own = [replace(state, G=G, A=A) for state, (G, A) in zip(own, pairs, strict=True)]
                sides = tuple(side for pair in pairs for side in pair)
                states.update(zip(self.names, own, strict=True))
            self._sides = sides
        return own

    def keep(self, states: dict[str, LayerState], moments: Any) -> list[LayerState]:
        """States with these moments of all layers, in their place."""
        self.moments = moments
        if len(self.names) == 1:
            self._slices = [moments]
        else:
            kept = zip(*(part.unbind() for part in vars(moments).values()), strict=True)
            self._slices = [type(moments)(*parts) for parts in kept]
        own = [replace(states[name], moments=one) for name, one in zip(self.names, self._slices, strict=True)]
        states.update(zip(self.names, own, strict=True))
        return own

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """[n, ..] of one of each layer; of one layer itself."""
        return parts[0] if len(parts) == 1 else torch.stack(list(parts))

    def apart(self, x: Tensor) -> Sequence[Tensor]:
        """Inverse of :meth:`together`; views."""
        return [x] if len(self.names) == 1 else x.unbind()

    def any(self, flags: Tensor) -> Tensor:
        """Bool [n], of one layer a scalar: whether it is so of any of a layer's maps, of one in groups."""
        return flags if len(self.names) > 1 else flags.any()


def _slice(vectors: Sequence[Tensor], values: Tensor, index: int) -> Eigenbasis:
    return Eigenbasis(tuple(part[index : index + 1] for part in vectors), values[index])


class Groups:
    """Those of a run, as its stacks are for a step: one that lacks an eigenbasis somewhere is taken layer by layer."""

    def __init__(self, stacks: Sequence[tuple[LayerSpec, ...]], precision: Precision) -> None:
        self.stacks, self.precision = stacks, precision
        self.kept: dict[tuple[str, ...], Group] = {}

    def of(self, states: Mapping[str, LayerState]) -> Iterable[Group]:
        """In the order of the stacks. What was in another group is forgotten there."""
        old, self.kept = self.kept, {}
        for layers in batches(self.stacks, states):
            names = tuple(layer.name for layer in layers)
            self.kept[names] = old.get(names) or Group(layers, self.precision)
        return self.kept.values()
