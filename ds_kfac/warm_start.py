"""A refresh that starts from the last eigenbasis: how far the factor has turned away from it decides what is done, or,
without a look, one step of orthogonal iteration is taken.

Shape suffixes: D a side's width, n blocks of width b.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_kfac.precision import SWITCH

ITERATIONS = 2
"""Orthogonal iterations at most; a third would cost what a decomposition does."""


@dataclass(frozen=True)
class WarmStart:
    """Up to where a rung is enough; ascending, 0 turns a rung off.

    With B = Q^T C Q, of the new factor C and the last eigenvectors Q, and off = |B - diag B|_F / |B|_F over all blocks:

    Attributes:
        keep: the basis stays if Q diag(values) Q^T is still this close to C, relatively: off and the change of the
            values together, since a factor may shrink without turning.
        values: off below which Q stays and diag B are the values.
        qr: off below which Q <- qr(C Q) is tried, until off is below ``values`` (or, if that is 0, ``keep``, or, if
            that is 0 too, ``qr``).
        exact_every: of so many refreshes one is exact and the others are :func:`iterated`, whatever the factor did;
            not together with a rung.
    """

    keep: float = 0.0
    values: float = 0.0
    qr: float = 0.0
    exact_every: int = 1

    def __post_init__(self) -> None:
        rungs = [rung for rung in (self.keep, self.values, self.qr) if rung]
        if rungs != sorted(rungs) or any(rung < 0 for rung in rungs):
            raise ValueError(f"tolerances of a warm start must ascend (0 turns one off), got {self}")
        if self.exact_every < 1 or (self.exact_every > 1 and rungs):
            raise ValueError(f"exact_every must be at least 1, and 1 where a tolerance is given, got {self}")

    @property
    def looks(self) -> bool:
        """Whether there is any rung."""
        return bool(self.keep or self.values or self.qr)


@dataclass(frozen=True)
class Warmed:
    """The basis a warm start arrived at. With "kept" and "values" ``vectors`` is what was given."""

    how: Literal["kept", "values", "qr"]
    vectors: tuple[Tensor, ...]
    values: Tensor


@dataclass(frozen=True)
class _Turned:
    """The factor seen from a basis: C Q, diag(Q^T C Q), and how far the latter and ``values`` are from all of it."""

    products: list[Tensor]
    diagonals: list[Tensor]
    off: float
    change: float

    @property
    def values(self) -> Tensor:
        return torch.cat([diagonal.reshape(-1) for diagonal in self.diagonals]).clamp(min=0)


def warmed(
    blocks: Sequence[Tensor], vectors: tuple[Tensor, ...], values: Tensor, tolerances: WarmStart
) -> Warmed | None:
    """The cheapest rung that is enough; None if only a decomposition is. Synchronises once per look.

    Args:
        blocks: the factor, fp32 [n, b, b] per group of equal blocks.
        vectors: of the last basis, shaped like ``blocks``.
        values: of the last basis, fp32 [D].

    Costs 4 b^3 FLOPs a block to look, and another 8/3 b^3 + 4 b^3 per iteration. On one CPU core a look takes a third
    of an eigh, an iteration about as long as one: ``qr`` is for GPUs, where eigh is slow. A value that is not finite
    passes no rung.
    """
    with torch.autocast(values.device.type, enabled=False):
        turned = _look(blocks, vectors, values)
        if math.hypot(turned.off, turned.change) < tolerances.keep:
            return Warmed("kept", vectors, values)
        if turned.off < tolerances.values:
            return Warmed("values", vectors, turned.values)
        if turned.off < tolerances.qr:
            enough = tolerances.values or tolerances.keep or tolerances.qr
            for _ in range(ITERATIONS):
                pieces = values.split([diagonal.numel() for diagonal in turned.diagonals])
                pairs = zip(turned.products, pieces, strict=True)
                vectors = tuple(_orthonormal(product, piece.view(product.shape[:-1])) for product, piece in pairs)
                turned = _look(blocks, vectors, values)
                values = turned.values
                if turned.off < enough:
                    return Warmed("qr", vectors, values)
    return None


def iterated(blocks: Tensor, vectors: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration, as SOAP takes (Vyas et al. 2024): Q <- qr(C Q), values <- diag(Q^T C Q).

    20/3 b^3 FLOPs a block where an eigh has 9. Does not synchronise with the host; a result that is not finite is the
    caller's to find.

    Args:
        blocks: C, fp32 [n, b, b].
        vectors: last eigenvectors, fp32 [n, b, b]; every new one stays near the old one at its place.
        values: last eigenvalues, fp32 [n, b].

    Returns:
        (values [n, b], vectors [n, b, b]), fp32.
    """
    with torch.autocast(blocks.device.type, enabled=False):
        new = _orthonormal(_exact_product(blocks, vectors).float(), values)
        diagonal = (_exact_product(blocks, new) * new).sum(dim=-2)
    return diagonal.float().clamp(min=0), new


def _exact_product(blocks: Tensor, vectors: Tensor) -> Tensor:
    """In fp32, or float64 where the process allows less for fp32."""
    with SWITCH:  # the thread that preconditions may allow TF32 for a moment
        exact = torch.float32 if _full_precision() else torch.float64
        return blocks.to(exact) @ vectors.to(exact)


def _look(blocks: Sequence[Tensor], vectors: Sequence[Tensor], values: Tensor) -> _Turned:
    products, diagonals, off, total = [], [], [], []
    with SWITCH:  # the thread that preconditions may allow TF32 for a moment
        exact = torch.float32 if _full_precision() else torch.float64
        for block, basis in zip(blocks, vectors, strict=True):
            basis = basis.to(exact)
            product = block.to(exact) @ basis
            turned = basis.mT @ product
            diagonal = turned.diagonal(dim1=-2, dim2=-1)
            products.append(product.float())
            diagonals.append(diagonal.float())  # a copy only if not fp32 already
            total.append(turned.norm())
            off.append((turned - torch.diag_embed(diagonal)).norm())
    change = torch.cat([diagonal.reshape(-1) for diagonal in diagonals]).clamp(min=0) - values
    norms = [torch.stack(off).norm(), change.norm(), torch.stack(total).norm()]
    off_norm, change_norm, norm = torch.stack([norm.double() for norm in norms]).tolist()
    norm = max(norm, torch.finfo(torch.float32).tiny)
    return _Turned(products, diagonals, off_norm / norm, change_norm / norm)


def _full_precision() -> bool:
    """Whether fp32 products are fp32: TF32's or bf16's three digits would drown small eigenvalues.

    Where they are not, ours run in float64: the switch belongs to the whole process, and other threads are at work.
    """
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set backend by backend, torch >= 2.9
        return False


def _orthonormal(product: Tensor, values: Tensor) -> Tensor:
    """qr(C Q), every column near where it was.

    Orthogonal iteration turns a column away from those on its left only, so it converges with the largest value first;
    the columns go back to their places afterwards, because moments are kept by place. The order is that of the values
    of Q's own factor: in diag(Q^T C Q) a turn adds its square times the largest value to the smallest.

    Args:
        product: C Q [n, b, b].
        values: [n, b].
    """
    order = values.argsort(dim=-1, descending=True, stable=True)
    largest_first = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    orthonormal = torch.linalg.qr(largest_first).Q
    places = order.argsort(dim=-1).unsqueeze(-2).expand_as(product)
    return orthonormal.gather(-1, places).contiguous()
