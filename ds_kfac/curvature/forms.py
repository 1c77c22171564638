"""What is kept of a factor, ``preconditioner.method``: one line of ``FACTOR_FORMS`` each.

A form says how a factor is decomposed, what that costs, how the result travels, is saved and read again, and how the
two results of a layer precondition its gradient. Everything else knows a form by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import (
    Eigenbasis,
    LayerBasis,
    Refreshed,
    Request,
    basis_from,
    basis_numel,
    flat_vectors,
    refresh_all,
)
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.inverse import (
    FLOPS,
    WHITEN_DAMPING,
    DampedInverse,
    LayerInverse,
    LayerRoot,
    from_packed,
    inverse_numel,
    packed,
    refresh_inverse,
    refresh_root,
)


class Kept(Protocol):
    """What a decomposition of a factor leaves: an eigenbasis, a damped inverse."""

    @property
    def nbytes(self) -> int: ...

    def rounded(self, dtype: torch.dtype) -> Any:
        """As it is after travelling in ``dtype``."""


@dataclass(frozen=True)
class Options:
    """Of a decomposition.

    Attributes:
        damping, damping_kind: at this step; used where the damping is part of what is kept.
        power: of an inverse root.
        products: "ieee" or "tf32": of iterations that consist of products.
    """

    damping: float
    damping_kind: str
    power: float = 1.0
    products: str = "ieee"


@dataclass(frozen=True)
class Part:
    """One flat tensor of what is kept, as it travels.

    Attributes:
        kind: its name in counters of bytes.
        numel: elements of a side's.
        flat: the tensor.
        halved: whether it may travel in 16 bits.
    """

    kind: str
    numel: Callable[[Side], int]
    flat: Callable[[Any], Tensor]
    halved: bool


@dataclass(frozen=True)
class FactorForm:
    """A line of :data:`FACTOR_FORMS`.

    Attributes:
        words: several of them, for people.
        solver: what decomposes, for people.
        solver_flops: of a dense side of width D, in D^3.
        solver_seconds: which table of the cost model has its seconds.
        product_flops: of preconditioning a gradient [O, I], in O I (O + I).
        passes, calls: over the gradient and of kernels, for the same.
        numel: fp32 elements a gradient worker keeps of a side.
        parts, joined: how it travels; ``joined`` takes the side and the flat parts, None for those without elements.
        identity: of a side that is the identity.
        decompose: a list of results in the order given. Synchronises with the device.
        of_layer: from those of G and A to what preconditions the layer: a :class:`LayerBasis`, in which gradients are
            rotated, an object with ``precondition`` as :class:`LayerInverse`, or a :class:`LayerRoot`, which whitens.
        save, load: a checkpoint's payload of plain tensors; back, from the side and the payload.
        paired: of a kind of damping, whether a decomposition needs the layer's other factor on the same rank.
        damps_identity: whether a partner that is the identity is part of what is kept.
        product_solver_flops: as ``solver_flops``, where products alone do it too; it is then the cheaper of both.
    """

    words: str
    solver: str
    solver_flops: int
    solver_seconds: str
    product_flops: int
    passes: int
    calls: int
    numel: Callable[[Side], int]
    parts: tuple[Part, ...]
    joined: Callable[..., Any]
    identity: Callable[[Side, torch.device], Any]
    decompose: Callable[[Sequence[Request], Options], list[Refreshed]]
    of_layer: Callable[[Any, Any], Any]
    save: Callable[[Any], dict[str, Any]]
    load: Callable[[Side, Mapping[str, Any], torch.device], Any]
    paired: Callable[[str], bool] = lambda damping_kind: False
    damps_identity: bool = False
    product_solver_flops: int = 0

    @cached_property
    def rotates(self) -> bool:
        """Whether gradients are rotated into an eigenbasis, in which moments can be kept."""
        return self.of_layer is LayerBasis

    @cached_property
    def whitens(self) -> bool:
        """Whether directions are whitened by it in the layer's own coordinates, as KFACAdamW does."""
        return self.of_layer is LayerRoot

    def wire_numel(self, side: Side) -> int:
        """Elements of a side's on the wire."""
        return sum(part.numel(side) for part in self.parts)


def _eigenbases(requests: Sequence[Request], options: Options) -> list[Refreshed]:
    return refresh_all(requests)


def _inverses(requests: Sequence[Request], options: Options) -> list[Refreshed]:
    damping, kind = options.damping, options.damping_kind
    return [refresh_inverse(r.factor, r.partner, damping=damping, damping_kind=kind) for r in requests]


def _roots(requests: Sequence[Request], options: Options) -> list[Refreshed]:
    power, products = options.power, options.products
    return [
        refresh_root(r.factor, power=power, damping=WHITEN_DAMPING, products=products, groups=r.groups)
        for r in requests
    ]


def _load_eigenbasis(side: Side, saved: Mapping[str, Any], device: torch.device) -> Eigenbasis:
    return Eigenbasis(tuple(vectors.to(device) for vectors in saved["vectors"]), saved["values"].to(device))


def _load_packed(name: str) -> Callable[[Side, Mapping[str, Any], torch.device], DampedInverse]:
    return lambda side, saved, device: from_packed(side, saved[name].to(device)) if side.block else DampedInverse()


EIGEN = FactorForm(
    words="eigenbases",
    solver="eigh",
    solver_flops=9,
    solver_seconds="eigh_seconds",
    product_flops=4,
    passes=6,
    calls=16,
    numel=lambda side: basis_numel(side) + side.dim,
    parts=(
        Part("eigenvectors", basis_numel, flat_vectors, True),
        # in fp32 always, their range is too wide
        Part("eigenvalues", lambda side: side.dim, lambda basis: basis.values, False),
    ),
    joined=lambda side, vectors, values: basis_from(side, vectors, values.clone()),
    identity=lambda side, device: Eigenbasis((), torch.ones(side.dim, device=device)),
    decompose=_eigenbases,
    of_layer=LayerBasis,
    save=lambda basis: {"vectors": list(basis.vectors), "values": basis.values},
    load=_load_eigenbasis,
)

INVERSE = FactorForm(
    words="inverses",
    solver="Cholesky",
    solver_flops=1,
    solver_seconds="cholesky_seconds",
    product_flops=2,
    passes=4,
    calls=10,
    numel=inverse_numel,
    parts=(Part("inverses", lambda side: side.numel, packed, False),),
    joined=from_packed,
    identity=lambda side, device: DampedInverse(),
    decompose=_inverses,
    of_layer=LayerInverse,
    save=lambda inverse: {"inverse": packed(inverse)},
    load=_load_packed("inverse"),
    paired=lambda damping_kind: damping_kind == "tikhonov",
    damps_identity=True,
)

ROOT = replace(
    INVERSE,
    words="inverse roots",
    solver="eigh",
    solver_flops=11,  # with the product of the root
    solver_seconds="eigh_seconds",
    product_flops=4,
    passes=6,
    calls=16,
    decompose=_roots,
    of_layer=LayerRoot,
    save=lambda root: {"root": packed(root)},
    load=_load_packed("root"),
    paired=lambda damping_kind: False,
    damps_identity=False,
    product_solver_flops=FLOPS,
)

FACTOR_FORMS: dict[str, FactorForm] = {"eigen": EIGEN, "inverse": INVERSE, "root": ROOT}
"""By ``preconditioner.method``."""
