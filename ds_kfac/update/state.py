"""The state that a gradient worker (a rank that preconditions the layer) keeps for a layer between
steps: eigenbases or inverses, and moments of the rotated gradient.

Shape suffixes: O and I are the sides of a layer's matrix. nOI stands for [n, O, I], n matrices of
the same shape.
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


@dataclass(frozen=True)
class Moments:
    """State that an update rule accumulates from gradients. A subclass is a frozen dataclass of
    fp32 tensors.

    A tensor whose name contains ``_OI`` has the shape of a gradient. All other tensors have one
    number for each matrix. The moments of a layer or a group have tensors of these two shapes:

    - one layer: [O, I] and [];
    - one layer in groups: [groups, O, I] and [groups];
    - a group of layers (``groups.py``): [n, O, I] and [n].

    Note: A second moment in another basis. Only the diagonal of the second moment is kept. The
    diagonal in another basis also depends on the other entries, so it can only be approximated. It
    is computed as if the other entries were zero, with the squares of Q's entries in place of Q
    (:meth:`LayerBasis.squared`).

    Attributes:
        NAME: name of the class in checkpoints.
        ROTATES: whether moments are rotated into each new eigenbasis.
    """

    NAME: ClassVar[str]
    ROTATES: ClassVar[bool] = False

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Any:
        """Return moments of zeros for gradients of a shape [.., O, I]."""
        shapes = [shape if "_OI" in part.name else shape[:-2] for part in fields(cls)]
        return cls(*(torch.zeros(part, device=device, dtype=torch.float32) for part in shapes))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values())

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """Rotate one layer's moments into a new eigenbasis, in place.

        Args:
            old: current basis of the moments; None: the layer's own coordinates.
        """

    def unrotated(self, basis: LayerBasis) -> Any:
        """Return one layer's moments in the layer's own coordinates, for a layer that loses its
        eigenbasis."""
        return self


@dataclass(frozen=True)
class CorrectedEigenvalues(Moments):
    """Running average of EKFAC's eigenvalues (George et al. 2018, arXiv:1806.03884). They replace
    beta alpha^T, the products of the eigenvalues of G and A.

    Attributes:
        second_OI: running average of the squared rotated gradient, called S below.
        updates: number of gradients in the average.
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
        """Average gradients into S (``second_OI``), and divide the gradients by the new S +
        damping, in one pass.

            S <- r S + (1 - r) terms rotated^2,   r = min(1 - 1/updates, decay)

        As for factors, the averaging window grows with the number of updates, until r has reached
        ``decay``. A squared gradient that is much larger than the average is scaled down to
        :data:`ds_kfac.curvature.factor.SPIKE` times the average before it enters S, like a batch
        before it enters a factor.

        Args:
            rotated_nOI: the rotated gradients. A large matrix is overwritten by the quotient.
            norm_n: norms of the gradients. (Rotation does not change a norm.) If ``terms_n`` times
                the squared norm of a matrix is not finite, the matrix's S does not change.
            terms_n: factors that convert squared gradients to the units of the Fisher.
            damping: number that is added to all eigenvalues.
            layer_mean: function that gets the mean eigenvalue of each matrix, [n], and returns for
                each matrix the mean over its layer, [n]. ``damping`` is then in units of this mean.
                None: ``damping`` is in units of the Fisher.

        Returns three values: the quotient [n, O, I]; its inner product with ``rotated_nOI``, [n];
        and bool [n], whether the gradient was scaled down before it was averaged into S.
        """
        size = terms_n * norm_n.square()
        usable = torch.isfinite(size)
        over = excess(size, self.second_OI.sum(dim=(-2, -1)), self.updates)
        terms = terms_n / over
        size = size / over
        self.updates.add_(usable)
        keep = torch.clamp(1 - 1 / self.updates.clamp(min=1), max=decay)
        if layer_mean is not None:
            # the mean of the new S follows from the gradient's norm, so no pass over S is needed
            old_mean = self.second_OI.mean(dim=(-2, -1))
            numel = rotated_nOI.shape[-2] * rotated_nOI.shape[-1]
            new_mean = torch.where(usable, keep * old_mean + (1 - keep) * (size / numel), old_mean)
            units = layer_mean(new_mean)
            # if S is 0, so is the gradient, and any positive damping avoids 0 / 0
            damping = damping * units.masked_fill(units == 0, 1.0)[:, None, None]
        weight = ((1 - keep) * terms)[:, None, None]
        keep = torch.where(usable, keep, 1.0)[:, None, None]
        in_chunks = is_large(rotated_nOI)
        quotient = rotated_nOI if in_chunks else torch.empty_like(rotated_nOI)
        tensors = (quotient, rotated_nOI, self.second_OI)
        dots: list[Tensor] = []
        for out, x, second in row_chunks(*tensors) if in_chunks else [tensors]:
            averaged = x.square().mul_(weight).add_(second * keep)
            # a weight of 0 is not enough, because 0 times infinity is NaN
            torch.where(usable[:, None, None], averaged, second, out=second)
            divided = torch.div(x, torch.add(second, damping, out=averaged), out=averaged)
            dots.append((x * divided).sum(dim=(-2, -1)))
            out.copy_(divided)
        return quotient, torch.stack(dots).sum(dim=0), (over > 1) & usable

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """Rotate S into the new eigenbasis if the layer had no eigenbasis before (``old`` is None).
        The result is approximate. If the layer had an eigenbasis, S does not change."""
        if old is None:
            change_basis_(self.second_OI, None, new.squared())

    def unrotated(self, basis: LayerBasis) -> "CorrectedEigenvalues":
        """Return S in the layer's own coordinates, approximately."""
        return replace(self, second_OI=basis.squared().restore(self.second_OI).contiguous())


@dataclass(frozen=True)
class AdamMoments(Moments):
    """Adam's state in the eigenbasis (SOAP, Vyas et al. 2024, arXiv:2409.11321).

    Attributes:
        first_OI, second_OI: running averages of R and R^2 without bias correction, where R is the
            rotated gradient.
        updates: number of steps so far.
    """

    NAME: ClassVar = "adam"
    ROTATES: ClassVar = True

    first_OI: Tensor
    second_OI: Tensor
    updates: Tensor

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        """Rotate the first moment. The second moment is rotated, approximately, only into the
        layer's first eigenbasis. Later refreshes do not change the second moment."""
        change_basis_(self.first_OI, old, new)
        if old is None:
            change_basis_(self.second_OI, None, new.squared())

    def unrotated(self, basis: LayerBasis) -> "AdamMoments":
        """Return the moments in the layer's own coordinates. For the second moment this is an
        approximation."""
        first = basis.restore(self.first_OI)
        second = basis.squared().restore(self.second_OI)
        return replace(self, first_OI=first.contiguous(), second_OI=second.contiguous())


@dataclass(frozen=True)
class LayerState:
    """The state of one layer. Its tensors are slices of the tensors of the layer's group
    (``groups.py``), or were read from a checkpoint.

    Attributes:
        terms: fp32 scalar, number of loss terms of the last batch that updated the factors. A mean
            gradient times the square root of this number has the size of a single term's gradient.
        method: how ``A`` and ``G`` were decomposed.
        A, G: eigenbases or damped inverses; None until the first refresh. Gradients are
            preconditioned once both exist.
        moments: moments of the rotated gradient; None if the update rule keeps no moments.
    """

    terms: Tensor
    method: Method = EIGEN
    A: Decomposition | None = None
    G: Decomposition | None = None
    moments: Any = None

    @cached_property
    def preconditioner(self) -> Any:
        """The layer's preconditioner, see ``Method.of_layer``. None while a side has no
        decomposition. Gradients are then not preconditioned."""
        if self.A is None or self.G is None:
            return None
        return self.method.of_layer(self.G, self.A)

    @cached_property
    def basis(self) -> LayerBasis | None:
        """The eigenbasis of the layer's Fisher. None while a side has no decomposition, and always
        None with a method that has no eigenbases."""
        return self.preconditioner if self.method.rotates else None

    def without(self, *, A: Decomposition | None, G: Decomposition | None) -> "LayerState":
        """Return this state with its moments rotated out of the bases of the given sides.

        Args:
            A, G: old basis of a side that is the identity from now on; None for a side that keeps
                its basis.
        """
        bases = [basis for basis in (A, G) if isinstance(basis, Eigenbasis) and basis.vectors]
        if not bases or self.moments is None:
            return self
        identity = Eigenbasis((), bases[0].values)  # the values of this eigenbasis are not read
        given_up = LayerBasis(
            G if isinstance(G, Eigenbasis) else identity,
            A if isinstance(A, Eigenbasis) else identity,
        )
        return replace(self, moments=self.moments.unrotated(given_up))
