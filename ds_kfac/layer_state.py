"""What a gradient worker of a layer keeps between steps, and how a step changes it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.eigenbasis import Eigenbasis, LayerBasis
from ds_kfac.inverse import DampedInverse, Kept, LayerInverse
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import AdamMoments, CorrectedEigenvalues
from ds_kfac.precision import fp32_products
from ds_kfac.side import Side


@dataclass(frozen=True)
class LayerState:
    """Everything of one layer. Replaced, never changed in place: a skipped step just drops the new one.

    Attributes:
        terms: fp32 scalar, loss terms of the last captured batch: a mean gradient times its root has the size of a
            single term's.
        A, G: eigenbases, or damped inverses; None until the first refresh. Gradients are preconditioned when both are
            there.
        corrected, adam: moments of the rotated gradient; at most one of them is used.
    """

    terms: Tensor
    A: Kept | None = None
    G: Kept | None = None
    corrected: CorrectedEigenvalues | None = None
    adam: AdamMoments | None = None

    @classmethod
    def empty(
        cls, layer: LayerSpec, device: torch.device, *, moments: str | None = None, method: str = "eigen"
    ) -> "LayerState":
        """Nothing seen yet; an identity side has its basis, or inverse.

        Args:
            moments: "corrected", "adam" or None.
            method: "eigen" or "inverse".
        """
        shape = (layer.dim_G, layer.dim_A)

        def known(side: Side) -> Kept | None:
            if side.block:
                return None
            return DampedInverse() if method == "inverse" else Eigenbasis((), torch.ones(side.dim, device=device))

        return cls(
            torch.ones((), device=device),
            known(layer.A),
            known(layer.G),
            corrected=CorrectedEigenvalues.empty(shape, device) if moments == "corrected" else None,
            adam=AdamMoments.empty(shape, device) if moments == "adam" else None,
        )

    @property
    def prepared(self) -> bool:
        """Whether gradients can be preconditioned."""
        return self.A is not None and self.G is not None

    @property
    def basis(self) -> LayerBasis | None:
        """Of the layer's Fisher; None while a side is missing, and with inverses."""
        if isinstance(self.G, Eigenbasis) and isinstance(self.A, Eigenbasis):
            return LayerBasis(self.G, self.A)
        return None

    @property
    def inverse(self) -> LayerInverse | None:
        """Of the layer's Fisher; None while a side is missing, and with eigenbases."""
        if isinstance(self.G, DampedInverse) and isinstance(self.A, DampedInverse):
            return LayerInverse(self.G, self.A)
        return None

    @property
    def moments_nbytes(self) -> int:
        return sum(part.nbytes for part in (self.corrected, self.adam) if part is not None)

    def rebased(self, *, A: Kept | None = None, G: Kept | None = None, carry: bool = False) -> "LayerState":
        """With new eigenbases or inverses of one or both sides, and the moments moved into the eigenbases.

        Args:
            carry: carry second moments over to the new basis; false keeps them as they are.
        """
        new = replace(self, A=A or self.A, G=G or self.G)
        basis, old = new.basis, self.basis
        if basis is None or (self.corrected is None and self.adam is None):
            return new
        device = basis.A.values.device  # an error here would stay in the moments
        with torch.autocast(device.type, enabled=False), fp32_products("ieee", device):
            overlap = LayerBasis(
                basis.G.overlap(old.G if old else None) if G is not None or old is None else _still(basis.G),
                basis.A.overlap(old.A if old else None) if A is not None or old is None else _still(basis.A),
            )
            return replace(
                new,
                corrected=self.corrected and self.corrected.moved(overlap, carry=carry),
                adam=self.adam and self.adam.moved(overlap, carry=carry),
            )


def _still(basis: Eigenbasis) -> Eigenbasis:
    """A rotation by nothing."""
    return Eigenbasis((), basis.values)
