"""What a gradient worker of a layer keeps between steps: eigenbases or inverses, and moments of its
gradient there.

Shape suffixes: O, I the sides of a layer's matrix; nOI stands for [n, O, I], n matrices of one
shape.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.factor import excess
from ds_kfac.curvature.methods import EIGEN, Decomposition, Method
from ds_kfac.update.rotation import change_basis_, is_large, row_chunks


class Moments:
    """What an update rule keeps of gradients: a frozen dataclass of fp32 tensors. Of one layer each
    is [O, I], those named ``_OI``, or a scalar ([groups, O, I] and [groups] of a layer in groups);
    of a group of layers (``groups.py``) [n, O, I] and [n].

    Attributes:
        NAME: in checkpoints.
        ROTATES: whether they go with the eigenbasis into a new one.
    """

    NAME: ClassVar[str]
    ROTATES: ClassVar[bool] = False

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Any:
        parts = [shape if "_OI" in part.name else shape[:-2] for part in fields(cls)]  # type: ignore[arg-type]
        return cls(*(torch.zeros(part, device=device, dtype=torch.float32) for part in parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values())

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """Into one layer's new eigenbasis those of its moments that go with it, in place.

        Args:
            old: None: the layer's own coordinates.
        """

    def unrotated(self, basis: LayerBasis) -> Any:
        """Out of one layer's eigenbasis, which is given up."""
        return self


@dataclass(frozen=True)
class CorrectedEigenvalues(Moments):
    """EKFAC (George et al. 2018, arXiv:1806.03884), its running-average form: what replaces beta
    alpha^T.

    Attributes:
        second_OI: running average of the squared rotated gradient.
        updates: gradients folded in so far.
    """

    NAME: ClassVar = "corrected"

    second_OI: Tensor
    updates: Tensor

    def divide_(
        self,
        rotated_nOI: Tensor,
        *,
        norm_n: Tensor,
        terms_n: Tensor | float,
        decay: float,
        damping: Tensor | float,
        layer_mean: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fold a gradient in, S <- r S + (1 - r) terms rotated^2 with r = min(1 - 1/updates,
        decay), as for factors, and divide it by the new S + damping, in one pass. As a batch in a
        factor, a gradient counts in S for at most :data:`ds_kfac.curvature.factor.SPIKE` times the
        average.

        Args:
            rotated_nOI: overwritten if it is large: the quotient takes its place.
            norm_n: of the gradient, rotated or not. Where its square times ``terms`` is not finite
                S stays as it is.
            terms_n: brings a squared gradient to the units of the Fisher.
            damping: what is added to all eigenvalues.
            layer_mean: of the matrices' mean eigenvalues [n] those of their layers, the units of
                ``damping``; None: it has none.

        Returns the quotient, its inner product with ``rotated_nOI`` [n], and whether the gradient
        was scaled down for S, bool [n].
        """
        size = terms_n * norm_n.square()
        usable = torch.isfinite(size)
        over = excess(size, self.second_OI.sum(dim=(-2, -1)), self.updates)
        terms, size = terms_n / over, size / over
        self.updates.add_(usable)
        keep = torch.clamp(1 - 1 / self.updates.clamp(min=1), max=decay)
        if layer_mean is not None:  # the mean of the new S is known before it
            old, count = (
                self.second_OI.mean(dim=(-2, -1)),
                rotated_nOI.shape[-2] * rotated_nOI.shape[-1],
            )
            mean = torch.where(usable, keep * old + (1 - keep) * (size / count), old)
            units = layer_mean(mean)
            # S is 0: the quotient is, too
            damping = damping * units.masked_fill(units == 0, 1.0)[:, None, None]
        keep, weight = (
            torch.where(usable, keep, 1.0)[:, None, None],
            ((1 - keep) * terms)[:, None, None],
        )
        quotient = rotated_nOI if is_large(rotated_nOI) else torch.empty_like(rotated_nOI)
        parts, dots = (quotient, rotated_nOI, self.second_OI), []
        for out, x, second in row_chunks(*parts) if is_large(rotated_nOI) else [parts]:
            averaged = x.square().mul_(weight).add_(second * keep)
            torch.where(usable[:, None, None], averaged, second, out=second)  # 0 * inf is NaN
            divided = torch.div(x, torch.add(second, damping, out=averaged), out=averaged)
            dots.append((x * divided).sum(dim=(-2, -1)))
            out.copy_(divided)
        return quotient, torch.stack(dots).sum(dim=0), (over > 1) & usable

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """Into the first basis, as far as a diagonal can be: what has left another one is not lost.
        Else they stay."""
        if old is None:
            change_basis_(self.second_OI, None, new.squared())

    def unrotated(self, basis: LayerBasis) -> "CorrectedEigenvalues":
        """Out of a basis, as far as a diagonal can be."""
        return replace(self, second_OI=basis.squared().restore(self.second_OI).contiguous())


@dataclass(frozen=True)
class AdamMoments(Moments):
    """Adam's state in the eigenbasis (SOAP, Vyas et al. 2024, arXiv:2409.11321).

    Attributes:
        first_OI, second_OI: not bias-corrected.
        updates: steps so far.
    """

    NAME: ClassVar = "adam"
    ROTATES: ClassVar = True

    first_OI: Tensor
    second_OI: Tensor
    updates: Tensor

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """The first moment. The second goes into the first basis, as far as a diagonal can be, and
        stays as it is."""
        change_basis_(self.first_OI, old, new)
        if old is None:
            change_basis_(self.second_OI, None, new.squared())

    def unrotated(self, basis: LayerBasis) -> "AdamMoments":
        """Out of a basis; the second moment as far as a diagonal can be."""
        first, second = basis.restore(self.first_OI), basis.squared().restore(self.second_OI)
        return replace(self, first_OI=first.contiguous(), second_OI=second.contiguous())


@dataclass(frozen=True)
class LayerState:
    """What is kept of one layer: slices of what its group has (``groups.py``), or what a checkpoint
    has of it.

    Attributes:
        terms: fp32 scalar, loss terms of the last captured batch: a mean gradient times its root
            has the size of a single term's.
        method: what ``A`` and ``G`` are.
        A, G: eigenbases, damped inverses; None until the first refresh. Gradients are
            preconditioned when both are there.
        moments: of the rotated gradient; None if the update rule keeps none.
    """

    terms: Tensor
    method: Method = EIGEN
    A: Decomposition | None = None
    G: Decomposition | None = None
    moments: Any = None

    @cached_property
    def preconditioner(self) -> Any:
        """Of the layer, see ``Method.of_layer``; None while a side is missing: gradients pass as
        they are."""
        return None if self.A is None or self.G is None else self.method.of_layer(self.G, self.A)

    @cached_property
    def basis(self) -> LayerBasis | None:
        """Of the layer's Fisher; None while a side is missing, and with a method that has none."""
        return self.preconditioner if self.method.rotates else None

    def without(self, *, A: Decomposition | None, G: Decomposition | None) -> "LayerState":
        """This state, its moments rotated out of A and G: the old bases of sides that are
        identities from now on; None for a side that keeps its basis."""
        bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
        if not bases or self.moments is None:
            return self
        nothing = Eigenbasis((), bases[0].values)
        undo = LayerBasis(
            *(basis if isinstance(basis, Eigenbasis) else nothing for basis in (G, A))
        )
        return replace(self, moments=self.moments.unrotated(undo))
