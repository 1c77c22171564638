"""Inverse roots of a layer's A, in place of its eigenbasis: what whitens a direction in the layer's own coordinates.

    S = (A / mean A + c)^-p        p = 1/n

On a GPU by matrix products alone, a coupled Newton iteration, where an eigendecomposition leaves the device idle:

    M <- C / |C|,  X <- |C|^-p        T = ((n + 1) 1 - M) / n,  X <- X T,  M <- T^n M        until M is 1

On a CPU, where eigh costs what a few products do, from the eigenvalues; there too if the iteration fails.

Sources: Guo & Higham 2006, a Schur-Newton method for the matrix p-th root; Anil et al. 2020 (arXiv:2002.09018).

Shape suffixes: O, I the sides of a layer's matrix, n blocks of width b.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Refreshed, climb, eigh, grouped, load_solvers, probe, sided
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.curvature.inverse import DampedInverse, from_packed, packed
from ds_kfac.curvature.precision import fp32_products

STEPS = 30
"""The smallest eigenvalue grows by more than 2.2 a step until it is near 1: enough for a condition of 1e9."""
CONVERGED, NEAR = 1e-5, 0.1
"""Residuals |M - 1| / sqrt(b): below the first there is nothing left to gain; below the second a step squares
it, until it stalls at what products round off, 1e-3 in TF32. That is enough for a preconditioner."""
CREDIBLE = 0.1
"""Of |X^(n/2) C X^(n/2) x - x| / |x| for one x: n times the error of a root. In TF32 an 8th root is worse from a
condition of about 1e4 on, and is taken again in fp32."""
FLOPS = 160
"""In b^3: 16 steps of 5 products, which p = 1/8 takes at a condition of 1e5."""
ORDERS = tuple(range(1, 17))
WHITEN_DAMPING = 0.01
"""c, added to A's eigenvalues for whitening, in units of their mean."""


def order_of(power: float) -> int | None:
    """n of p = 1/n, None of other powers: roots are of whole orders."""
    return next((n for n in ORDERS if abs(power * n - 1) < 1e-6), None)


@dataclass(frozen=True)
class LayerRoot:
    """What whitens a layer's direction: the inverse root of A. G has none, it is the identity."""

    G: DampedInverse
    A: DampedInverse

    def whiten(self, x_OI: Tensor) -> Tensor:
        """x S."""
        return sided(lambda x: x, self.A.apply, x_OI)


def refresh_root(
    factor: KroneckerFactor, *, power: float, damping: float, products: str, groups: int = 1
) -> Refreshed[DampedInverse]:
    """The inverse root of a usable factor. Synchronises with the device, on a GPU once a step of the iteration.

    Args:
        power: p.
        damping: c, in units of the mean eigenvalue, of each group its own.
        products: "ieee" or "tf32", see :func:`ds_kfac.curvature.precision.fp32_products`.
        groups: of the layer, whose factor is that of each after the other.
    """
    side, packed_P = factor.side, factor.packed_P
    mean = side.diagonal_of(packed_P).view(groups, -1).sum(1) / (side.dim // groups)
    mean_D = mean.clamp(min=torch.finfo(torch.float32).tiny).repeat_interleave(side.dim // groups)
    if side.block == 1:
        return Refreshed(DampedInverse(diagonal=(packed_P.clamp(min=0) / mean_D + damping) ** -power), "diagonal")
    order = order_of(power)
    assert order is not None
    load_solvers(packed_P.device)
    found, retries, how = [], 0, "newton" if grouped(packed_P.device) else "eigh"
    start = 0
    for blocks in side.blocks(packed_P):
        count, width = blocks.shape[:2]
        C_nbb, root = blocks / mean_D[start : start + count * width : width, None, None], None
        start += count * width
        if how == "newton":
            damped = C_nbb.clone()
            damped.diagonal(dim1=-2, dim2=-1).add_(damping)
            for precision in dict.fromkeys((products, "ieee")):
                root = by_products(damped, order, precision) if root is None else root
                retries += root is None
            how = "eigh" if root is None else how
        if root is None:
            solution, failures = climb(C_nbb, eigh)
            retries += failures
            if solution is None:
                return Refreshed(None, "failed", retries)
            values, vectors = solution
            with fp32_products("ieee", C_nbb.device):
                root = (vectors * (values + damping).pow(-power).unsqueeze(-2)) @ vectors.mT
        found.append(root)
    # one triangle, as receivers unpack it
    return Refreshed(from_packed(side, packed(DampedInverse(tuple(found)))), how, retries)  # type: ignore[arg-type]


def by_products(C_nbb: Tensor, order: int, products: str) -> Tensor | None:
    """C^(-1/order) of positive definite blocks; None if it is not one."""
    one = torch.eye(C_nbb.shape[-1], device=C_nbb.device, dtype=C_nbb.dtype)
    size = torch.linalg.matrix_norm(C_nbb, keepdim=True)
    M, X, last = C_nbb / size, one * size ** (-1 / order), float("inf")
    with fp32_products(products, C_nbb.device):  # type: ignore[arg-type]
        for _ in range(STEPS):
            T = one * (1 + 1 / order) - M / order
            X, M = X @ T, _power(T, order) @ M
            residual = float(torch.linalg.matrix_norm(M - one).max()) / len(one) ** 0.5
            if residual < CONVERGED or (last < NEAR and not residual < last / 2):
                break
            last = residual
    if not residual < NEAR:
        return None
    y = x = probe(C_nbb)  # M may have lost touch with X
    for matrix in [X] * (order // 2) + [C_nbb] + [X] * (order - order // 2):
        y = (matrix * y.unsqueeze(-2)).sum(-1)
    return X if bool(((y - x).norm(dim=-1) <= CREDIBLE * x.norm()).all()) else None


def _power(T: Tensor, order: int) -> Tensor:
    """T^order, by squaring."""
    found: Tensor | None = None
    while True:
        if order % 2:
            found = T if found is None else found @ T
        order //= 2
        if not order:
            assert found is not None
            return found
        T = T @ T
