"""What the owner of a layer keeps between steps, and how a step changes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.capture import BatchSums
from ds_kfac.eigenbasis import LayerBasis, refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import AdamMoments, CorrectedEigenvalues


@dataclass(frozen=True)
class LayerState:
    """Everything of one layer. Replaced, never changed in place: a skipped step just drops the new one.

    Attributes:
        terms: fp32 scalar, loss terms of the last captured batch: a mean gradient times its root has the size of a
            single term's.
        basis: None until the first refresh; gradients are not rotated then.
        corrected, adam: moments of the rotated gradient; at most one of them is used.
    """

    A: KroneckerFactor
    G: KroneckerFactor
    terms: Tensor
    basis: LayerBasis | None = None
    corrected: CorrectedEigenvalues | None = None
    adam: AdamMoments | None = None

    @classmethod
    def empty(cls, layer: LayerSpec, device: torch.device, *, moments: str | None = None) -> "LayerState":
        """Nothing seen yet.

        Args:
            moments: "corrected", "adam" or None.
        """
        shape = (layer.dim_G, layer.dim_A)
        return cls(
            KroneckerFactor.empty(layer.A, device),
            KroneckerFactor.empty(layer.G, device),
            torch.ones((), device=device),
            corrected=CorrectedEigenvalues.empty(shape, device) if moments == "corrected" else None,
            adam=AdamMoments.empty(shape, device) if moments == "adam" else None,
        )

    @property
    def kfac_nbytes(self) -> int:
        """Bytes of factors, eigenbases and corrected eigenvalues."""
        return sum(part.nbytes for part in (self.A, self.G, self.basis, self.corrected) if part is not None)

    @property
    def adam_nbytes(self) -> int:
        """Bytes of Adam's moments, which the user's optimizer then has not."""
        return 0 if self.adam is None else self.adam.nbytes

    def folded(self, sums: Sequence[BatchSums], *, decay: float) -> "LayerState":
        """With one reduced batch, of every use of the layer, folded into both factors."""
        if len(sums) == 1:
            (batch,) = sums
            sum_A, count_A, sum_G, count_G = batch.A_P, batch.counts_2[0], batch.G_P, batch.counts_2[1]
        else:
            sum_A, sum_G = self._tied(*sums)
            count_A = count_G = torch.where(sums[0].counts_2.min() > 0, 1.0, 0.0)
        counts = sums[0].counts_2
        terms = torch.where(counts[1] > 0, counts[1], counts[0])  # without gradients: its rows
        return replace(
            self,
            A=self.A.averaged(sum_A, count_A, decay=decay),
            G=self.G.averaged(sum_G, count_G, decay=decay),
            terms=torch.where(terms > 0, terms, self.terms),
        )

    def _tied(self, head: BatchSums, embedding: BatchSums) -> tuple[Tensor, Tensor]:
        """Factors of a weight [vocabulary, width] with two uses, whose Fisher is the sum of two Kronecker products.

        Each side gets the partial trace of that sum over the other side: exact where one use dominates, and exact in
        both partial traces always. Cross terms between the uses are left out.
        """
        width, vocabulary = self.A.side, self.G.side
        A_head, G_head = (head.A_P / head.counts_2[0].clamp(min=1)), head.G_P / head.counts_2[1].clamp(min=1)
        counts, G_embedding = (
            embedding.A_P / embedding.counts_2[0].clamp(min=1),
            embedding.G_P / embedding.counts_2[1].clamp(min=1),
        )
        of_width = A_head * vocabulary.trace(G_head) + G_embedding * vocabulary.trace(counts)
        of_vocabulary = G_head * width.trace(A_head) + counts * width.trace(G_embedding)
        total = vocabulary.trace(of_vocabulary)
        return of_width, of_vocabulary / torch.where(total > 0, total, torch.ones_like(total))

    def refreshed(self, *, method: str, carry: bool = False) -> tuple["LayerState", int]:
        """With a new eigenbasis and the moments moved into it, or unchanged if a decomposition fails.

        Args:
            carry: carry second moments over to the new basis; false keeps them as they are.

        Returns the state, and how many rungs of the ladder failed.
        """
        basis_A, failed_A = refresh(self.A, method=method)
        basis_G, failed_G = refresh(self.G, method=method)
        if basis_A is None or basis_G is None:
            return self, failed_A + failed_G
        basis = LayerBasis(basis_G, basis_A)
        overlap = basis.overlap(self.basis)
        return replace(
            self,
            basis=basis,
            corrected=self.corrected and self.corrected.moved(overlap, carry=carry),
            adam=self.adam and self.adam.moved(overlap, carry=carry),
        ), failed_A + failed_G


def decomposable(states: Mapping[str, LayerState]) -> list[str]:
    """Names of the layers whose factors are both usable. One transfer to the host for all of them."""
    if not states:
        return []
    usable = [factor.usable() for state in states.values() for factor in (state.A, state.G)]
    both = torch.stack(usable).view(-1, 2).all(dim=1).tolist()
    return [name for name, ok in zip(states, both, strict=True) if ok]
