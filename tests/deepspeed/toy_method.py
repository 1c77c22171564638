"""A method of factors that nobody needs: a new one costs its own file and a line of ``METHODS``."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Refreshed
from ds_kfac.curvature.methods import DecompositionPart, Method


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
    parts = (
        DecompositionPart(
            "roots", lambda side: side.dim**2, lambda root: root.matrix_DD.reshape(-1), False
        ),
    )

    def numel(self, side):
        return side.dim**2

    def identity(self, side, device):
        return Root(torch.eye(side.dim, device=device))

    def decompose(self, requests, **options) -> list[Refreshed]:
        found = []
        for request in requests:
            (blocks,) = request.factor.side.blocks(request.factor.packed_P)
            values, vectors = torch.linalg.eigh(blocks[0])
            found.append(
                Refreshed(Root(vectors @ ((values + 0.1) ** -0.5).diag() @ vectors.T), "eigh")
            )
        return found

    def joined(self, side, *flats):
        return Root(flats[0].clone().view(side.dim, side.dim))

    def of_layer(self, G, A):
        return LayerRoot(G, A)


ROOT = RootMethod()
