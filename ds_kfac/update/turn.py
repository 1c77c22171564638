"""From the eigenbasis that moments are in into a newer one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.precision import fp32_products
from ds_kfac.update.rotation import is_large, rows_at_once


@dataclass(frozen=True)
class Turn:
    """Of a layer. What turns is computed when it is asked for: turned moments that wait for their step to be applied
    would take as much memory as a gradient.

    Attributes:
        old: None: the layer's own coordinates.
    """

    old: LayerBasis | None
    new: LayerBasis

    def __call__(self, x_OI: Tensor, out_OI: Tensor | None = None) -> Tensor:
        """fp32 [O, I], contiguous; into ``out_OI``, which may be ``x_OI``, a large matrix some rows at a time."""
        if not is_large(x_OI):
            with self._exactly():
                turned = self._overlap().rotate(x_OI)
            return turned.contiguous() if out_OI is None else out_OI.copy_(turned)
        out_OI = torch.empty_like(x_OI) if out_OI is None else out_OI
        for out, turned in zip(out_OI.split(rows_at_once(x_OI)), self.rows(x_OI), strict=True):
            out.copy_(turned)
        return out_OI

    def rows(self, x_OI: Tensor) -> Iterator[Tensor]:
        """Of a large matrix, :func:`ds_kfac.update.rotation.rows_at_once` at a time."""
        with self._exactly():
            overlap = self._overlap()
            apart = not overlap.G.vectors
            x_OI = x_OI if apart else overlap.rotate(x_OI)
        for rows in x_OI.split(rows_at_once(x_OI)):
            if apart:
                with self._exactly():
                    rows = overlap.rotate(rows)
            yield rows

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """In fp32: an error here would stay in the moments."""
        device = self.new.A.values.device
        with torch.autocast(device.type, enabled=False), fp32_products("ieee", device):
            yield

    def _overlap(self) -> LayerBasis:
        old = self.old
        return LayerBasis(_overlap(self.new.G, old.G if old else None), _overlap(self.new.A, old.A if old else None))


def _overlap(new: Eigenbasis, old: Eigenbasis | None) -> Eigenbasis:
    return still(new) if new is old else new.overlap(old)


def still(basis: Eigenbasis) -> Eigenbasis:
    """A rotation by nothing."""
    return Eigenbasis((), basis.values)
