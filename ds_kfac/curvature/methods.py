"""What is kept of a factor, ``preconditioner.method``: one line of ``METHODS`` each.

A method says how a factor is decomposed, what that costs, how the result travels, is saved and read again, and how the
two results of a layer precondition its gradient. Everything else knows it by its interface.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis, Refreshed, Request, refresh_all
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.inverse import (
    DampedInverse,
    LayerInverse,
    from_packed,
    inverse_numel,
    packed,
    refresh_inverse,
)
from ds_kfac.curvature.iteration import EXACT_EVERY, refresh_from_last
from ds_kfac.curvature.iteration import FLOPS as STEP_FLOPS


class Decomposition(Protocol):
    """What a decomposition of a factor leaves: an eigenbasis, a damped inverse."""

    @property
    def nbytes(self) -> int: ...

    def rounded(self, dtype: torch.dtype) -> Any:
        """As it is after travelling in ``dtype``."""


@dataclass(frozen=True)
class DecompositionPart:
    """One flat tensor of what is kept, as it travels and is saved.

    Attributes:
        kind: its name in counters of bytes and in files.
        numel: elements of a side's.
        flat: the tensor.
        halved: whether it may travel in 16 bits.
    """

    kind: str
    numel: Callable[[Side], int]
    flat: Callable[[Any], Tensor]
    halved: bool


class Method:
    """A line of :data:`METHODS`.

    Attributes:
        words: several of what is kept, for people.
        solver: what decomposes, for people.
        solver_flops: of a dense side of width D, in D^3.
        solver_seconds: which table of the cost model has its seconds.
        step_flops: of one step from the last result, in D^3; 0: every refresh is by ``solver``. Where a device has a
            rate for it, so are all refreshes after the burn-in but one in ``exact_every``.
        product_flops: of preconditioning a gradient [O, I], in O I (O + I).
        passes, calls: over the gradient and of kernels, for the same.
        parts: how it travels.
        rotates: whether gradients are rotated into an eigenbasis, in which moments can be kept.
        damps_identity: whether the damping, and that of a partner that is the identity, is part of what is kept.
    """

    words: str
    solver: str
    solver_flops: int
    solver_seconds: str
    step_flops, exact_every = 0.0, 1
    product_flops = 4
    passes, calls = 6, 16
    parts: tuple[DecompositionPart, ...]
    rotates = damps_identity = False

    def numel(self, side: Side) -> int:
        """fp32 elements a gradient worker keeps of a side."""
        raise NotImplementedError

    def wire_numel(self, side: Side) -> int:
        """Elements of a side's on the wire."""
        return sum(part.numel(side) for part in self.parts)

    def paired(self, damping_kind: str) -> bool:
        """Whether a decomposition needs the layer's other factor on the same rank."""
        return False

    def identity(self, side: Side, device: torch.device) -> Any:
        """Of a side that is the identity."""
        raise NotImplementedError

    def decompose(self, requests: Sequence[Request], **options: Any) -> list[Refreshed]:
        """In the order given. Synchronises with the device.

        Args:
            options: ``damping`` at this step and ``damping_kind`` where they are part of what is kept.
        """
        raise NotImplementedError

    def joined(self, side: Side, *flats: Any) -> Any:
        """Inverse of ``parts``: flat tensors, None for those without elements."""
        raise NotImplementedError

    def of_layer(self, G: Any, A: Any) -> Any:
        """What preconditions the layer: a :class:`LayerBasis`, in which gradients are rotated, or an object with
        ``precondition`` as :class:`LayerInverse`."""
        raise NotImplementedError


def _flat(basis: Eigenbasis) -> Tensor:
    return torch.cat([basis.values[:0], *(vectors.reshape(-1) for vectors in basis.vectors)])


class _Eigen(Method):
    words, solver, solver_flops, solver_seconds = "eigenbases", "eigh", 9, "eigh_seconds"
    parts = (
        DecompositionPart("eigenvectors", lambda side: side.basis_numel, _flat, True),
        # in fp32 always, their range is too wide
        DecompositionPart("eigenvalues", lambda side: side.dim, attrgetter("values"), False),
    )
    rotates = True

    def numel(self, side: Side) -> int:
        return side.basis_numel + side.dim

    def identity(self, side: Side, device: torch.device) -> Eigenbasis:
        return Eigenbasis((), torch.ones(side.dim, device=device))

    decompose, of_layer = staticmethod(refresh_all), LayerBasis  # type: ignore[assignment]  # it has no options

    def joined(self, side: Side, *flats: Any) -> Eigenbasis:
        flat, values = flats
        vectors: list[Tensor] = []
        if flat is not None and side.block > 1:
            for (n, width), part in zip(side.groups, flat.split([n * w**2 for n, w in side.groups]), strict=True):
                vectors.append(part.to(torch.float32, copy=True).view(n, width, width))
        return Eigenbasis(tuple(vectors), values.clone())


class _Iterated(_Eigen):
    """What "eigen" is on a GPU for a rule that keeps moments in the eigenbasis: they rotate along, and their bases are
    in every checkpoint."""

    solver = f"orthogonal iteration, every {EXACT_EVERY}th time and in the burn-in by eigh"
    step_flops, exact_every = STEP_FLOPS, EXACT_EVERY
    decompose = staticmethod(refresh_from_last)


class _Inverse(Method):
    words, solver, solver_flops, solver_seconds = "inverses", "Cholesky", 1, "cholesky_seconds"
    product_flops, passes, calls = 2, 4, 10
    parts = (DecompositionPart("inverses", lambda side: side.numel, packed, False),)
    damps_identity, of_layer = True, LayerInverse

    def numel(self, side: Side) -> int:
        return inverse_numel(side)

    def paired(self, damping_kind: str) -> bool:
        return damping_kind == "tikhonov"

    def identity(self, side: Side, device: torch.device) -> DampedInverse:
        return DampedInverse()

    def decompose(self, requests: Sequence[Request], **options: Any) -> list[Refreshed]:
        return [refresh_inverse(request.factor, request.partner, **options) for request in requests]

    def joined(self, side: Side, *flats: Any) -> DampedInverse:
        return from_packed(side, flats[0]) if side.block else DampedInverse()


EIGEN, ITERATED = _Eigen(), _Iterated()
METHODS: dict[str, Method] = {"eigen": EIGEN, "inverse": _Inverse()}
"""By ``preconditioner.method``."""
