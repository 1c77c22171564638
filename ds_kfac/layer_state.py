"""What the owner of a layer keeps between steps, and how a step changes it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ds_kfac.capture import BatchSums
from ds_kfac.eigenbasis import Eigenbasis, refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.layers.base import LayerSpec


@dataclass(frozen=True)
class LayerState:
    """Factors and eigenbases of one layer. Replaced, never changed in place: a skipped step just drops the new one."""

    A: KroneckerFactor
    G: KroneckerFactor
    basis_A: Eigenbasis | None = None
    basis_G: Eigenbasis | None = None

    @classmethod
    def empty(cls, layer: LayerSpec, device: torch.device) -> "LayerState":
        return cls(KroneckerFactor.empty(layer.dim_A, device), KroneckerFactor.empty(layer.dim_G, device))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.A, self.G, self.basis_A, self.basis_G) if part is not None)

    def folded(self, batch: BatchSums, *, decay: float) -> "LayerState":
        """With one reduced batch folded into both factors."""
        return replace(
            self,
            A=self.A.averaged(batch.A_P, batch.counts_2[0], decay=decay),
            G=self.G.averaged(batch.G_P, batch.counts_2[1], decay=decay),
        )

    def refreshed(self, *, method: str) -> tuple["LayerState", int]:
        """With new eigenbases, or unchanged if a decomposition fails; and how many rungs of the ladder failed."""
        basis_A, failed_A = refresh(self.A.dense(), method=method)
        basis_G, failed_G = refresh(self.G.dense(), method=method)
        if basis_A is None or basis_G is None:
            return self, failed_A + failed_G
        return replace(self, basis_A=basis_A, basis_G=basis_G), failed_A + failed_G


def decomposable(states: Mapping[str, LayerState]) -> list[str]:
    """Names of the layers whose factors have data, are finite and not zero. One transfer to the host for all of them.

    G is zero as long as everything above a layer is, as with a zero-initialised output projection; relative damping
    would then be zero too.
    """
    if not states:
        return []
    usable = [
        (factor.updates > 0) & torch.isfinite(factor.packed_P).all() & (factor.packed_P != 0).any()
        for state in states.values()
        for factor in (state.A, state.G)
    ]
    both = torch.stack(usable).view(-1, 2).all(dim=1).tolist()
    return [name for name, ok in zip(states, both, strict=True) if ok]
