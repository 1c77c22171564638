"""What a gradient worker of a layer keeps between steps, and how a step changes it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.forms import EIGEN, FactorForm, Kept
from ds_kfac.curvature.side import Side
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.moments import Moments
from ds_kfac.update.turn import Turn, still


@dataclass(frozen=True)
class LayerState:
    """Everything of one layer. A step makes another, which is dropped if it is skipped; moments may be the same, and
    change when the step was applied.

    Attributes:
        terms: fp32 scalar, loss terms of the last captured batch: a mean gradient times its root has the size of a
            single term's.
        form: what ``A`` and ``G`` are.
        A, G: eigenbases, damped inverses or roots; None until the first refresh. Gradients are preconditioned when both
            are there.
        moments: of the rotated gradient; None if the update rule keeps none.
        turn: what is to be done to them before they are in the eigenbases; None: nothing.
    """

    terms: Tensor
    form: FactorForm = EIGEN
    A: Kept | None = None
    G: Kept | None = None
    moments: Any = None
    turn: Turn | None = None

    @classmethod
    def empty(
        cls, layer: LayerSpec, device: torch.device, *, moments: type[Moments] | None = None, form: FactorForm = EIGEN
    ) -> "LayerState":
        """Nothing seen yet; of an identity side it is known what is kept."""

        def known(side: Side) -> Kept | None:
            return None if side.block else form.identity(side, device)

        own = None if moments is None else moments.empty(layer.shape, device)
        return cls(torch.ones((), device=device), form, known(layer.A), known(layer.G), own)

    @property
    def prepared(self) -> bool:
        """Whether gradients can be preconditioned."""
        return self.A is not None and self.G is not None

    @property
    def preconditioner(self) -> Any:
        """Of the layer, see ``FactorForm.of_layer``; None while a side is missing."""
        return self.form.of_layer(self.G, self.A) if self.prepared else None

    @property
    def basis(self) -> LayerBasis | None:
        """Of the layer's Fisher; None while a side is missing, and with a form that has none."""
        return self.preconditioner if self.form.rotates else None

    @property
    def moments_nbytes(self) -> int:
        return 0 if self.moments is None else self.moments.nbytes

    def rebased(self, *, A: Kept | None = None, G: Kept | None = None) -> "LayerState":
        """With new eigenbases or inverses of one or both sides; Adam's first moment is to be turned into the
        eigenbases. Second moments stay as they are."""
        new = replace(self, A=A or self.A, G=G or self.G)
        if new.basis is None or self.moments is None or not self.moments.TURNS:
            return new
        return replace(new, turn=Turn(self.turn.old if self.turn else self.basis, new.basis))

    def settled(self) -> "LayerState":
        """With moments that are in the eigenbases."""
        return self if self.turn is None else replace(self, moments=self.moments.turned(self.turn), turn=None)

    def without(self, *, A: Kept | None, G: Kept | None) -> "LayerState":
        """With the moments taken out of eigenbases of sides that are identities now; None: of a side that is not."""
        bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
        if not bases or self.moments is None:
            return self
        undo = LayerBasis(*(basis if isinstance(basis, Eigenbasis) else still(bases[0]) for basis in (G, A)))
        return replace(self, moments=self.moments.unrotated(undo))
