"""From the eigenbasis that moments are in into a newer one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.curvature.eigenbasis import Eigenbasis, LayerBasis
from ds_kfac.curvature.precision import fp32_products


@dataclass(frozen=True)
class Turn:
    """Of a layer. What turns is computed when it is asked for: turned moments that wait for their step to be applied
    would take as much memory as a gradient.

    Attributes:
        old: None: the layer's own coordinates.
    """

    old: LayerBasis | None
    new: LayerBasis

    def __call__(self, x_OI: Tensor) -> Tensor:
        """fp32 [O, I], contiguous."""
        device = self.new.A.values.device  # an error here would stay in the moments
        with torch.autocast(device.type, enabled=False), fp32_products("ieee", device):
            old = self.old
            overlap = LayerBasis(
                _overlap(self.new.G, old.G if old else None),
                _overlap(self.new.A, old.A if old else None),
            )
            return overlap.rotate(x_OI).contiguous()


def _overlap(new: Eigenbasis, old: Eigenbasis | None) -> Eigenbasis:
    return still(new) if new is old else new.overlap(old)


def still(basis: Eigenbasis) -> Eigenbasis:
    """A rotation by nothing."""
    return Eigenbasis((), basis.values)
