"""An update rule and a method of factors that nobody needs: a new one costs its own file and a line of a table."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.eigen import LayerBasis, Refreshed
from ds_kfac.curvature.methods import DecompositionPart, Method
from ds_kfac.directions.base import Direction, UpdateRule
from ds_kfac.update.rotation import change_basis_, mask_null_space
from ds_kfac.update.state import Moments


class ToySGD(torch.optim.SGD):
    """What the toy rule follows."""


@dataclass(frozen=True)
class Mean(Moments):
    """The running mean of rotated gradients."""

    NAME: ClassVar = "mean"
    ROTATES: ClassVar = True

    first_OI: Tensor

    def change_basis_(self, old: LayerBasis | None, new: LayerBasis) -> None:
        change_basis_(self.first_OI, old, new)

    def unrotated(self, basis: LayerBasis) -> "Mean":
        return Mean(basis.restore(self.first_OI).contiguous())


class SoftSign(Direction):
    """m <- (m + R) / 2; Q_G [m / (|m| + 0.01)] Q_A^T, 0 in null spaces, at the length of the gradient."""

    def layer(self, context, layer, gradient, basis, moments) -> tuple[Tensor, Mean]:
        mean = (moments.first_OI + basis.rotate(gradient)) / 2
        result = basis.restore(mask_null_space(mean / (mean.abs() + 0.01), basis))
        return result * (gradient.norm() / result.norm().clamp(min=1e-30)), Mean(mean)


class ToyRule(UpdateRule):
    optimizer_type = "ToySGD"

    def claims(self, optimizer: Any) -> bool:
        return isinstance(optimizer, ToySGD)

    def direction(self, plan, layout, exchange, optimizer, metrics) -> SoftSign:
        return SoftSign(plan, layout, exchange)

    def described(self, plan, optimizer: str, ratio: float = 1.0) -> str:
        return "soft sign in the eigenbasis"

    def moments(self, config: KFACConfig) -> type[Mean]:
        return Mean


@dataclass(frozen=True)
class Root:
    """(factor + 0.1)^-1/2, whole."""

    matrix_DD: Tensor

    def rounded(self, dtype: torch.dtype) -> "Root":
        return self


@dataclass(frozen=True)
class LayerRoot:
    G: Root
    A: Root

    def precondition(self, gradient_OI: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        V = self.G.matrix_DD @ gradient_OI @ self.A.matrix_DD
        return V, (V * gradient_OI).sum()


class RootMethod(Method):
    words, solver, solver_flops, solver_seconds = "roots", "eigh", 9, "eigh_seconds"
    product_flops, passes, calls = 2, 2, 4
    parts = (DecompositionPart("roots", lambda side: side.dim**2, lambda root: root.matrix_DD.reshape(-1), False),)

    def numel(self, side):
        return side.dim**2

    def identity(self, side, device):
        return Root(torch.eye(side.dim, device=device))

    def decompose(self, requests, **options) -> list[Refreshed]:
        found = []
        for request in requests:
            (blocks,) = request.factor.side.blocks(request.factor.packed_P)
            values, vectors = torch.linalg.eigh(blocks[0])
            found.append(Refreshed(Root(vectors @ ((values + 0.1) ** -0.5).diag() @ vectors.T), "eigh"))
        return found

    def joined(self, side, *flats):
        return Root(flats[0].clone().view(side.dim, side.dim))

    def of_layer(self, G, A):
        return LayerRoot(G, A)


ROOT = RootMethod()
