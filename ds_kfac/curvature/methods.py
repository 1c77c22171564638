"""Methods of decomposing a factor. ``preconditioner.method`` selects one of the entries of
``METHODS``.

A method defines how a factor is decomposed and at what cost, how the decomposition is sent, saved
and loaded, and how a layer's two decompositions precondition its gradient. All other code uses only
this interface.
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
    packed,
    refresh_inverse,
)
from ds_kfac.curvature.iteration import EXACT_EVERY, refresh_from_last
from ds_kfac.curvature.iteration import FLOPS as STEP_FLOPS


class Decomposition(Protocol):
    """Result of decomposing a factor: an eigenbasis, or a damped inverse."""

    def rounded(self, dtype: torch.dtype) -> Any:
        """Return the decomposition with the rounding that it would have after being sent in
        ``dtype``."""


@dataclass(frozen=True)
class DecompositionPart:
    """One flat tensor of a decomposition, in the form in which it is sent and saved.

    Attributes:
        kind: the tensor's name in byte counters and in files.
        numel: function that returns the tensor's number of elements for a given side.
        flat: function that returns the tensor of a given decomposition.
        halved: whether the tensor may be sent in 16 bits.
    """

    kind: str
    numel: Callable[[Side], int]
    flat: Callable[[Any], Tensor]
    halved: bool


class Method:
    """A method of decomposing factors, an entry of :data:`METHODS`.

    Attributes:
        words: name of the decompositions in reports, in the plural.
        solver: name of the solver in reports.
        solver_flops: FLOPs to decompose a dense side of width D, divided by D^3.
        solver_seconds: name of the cost model's attribute that has the solver's times in seconds.
        step_flops: FLOPs of one iteration step that starts from the previous decomposition, divided
            by D^3; 0 for a method that does not iterate. A method that iterates uses the solver
            only in the burn-in and, after it, in every ``exact_every``-th refresh.
        product_flops: FLOPs to precondition a gradient [O, I], divided by O I (O + I).
        passes: how many tensors of the gradient's size are read or written to precondition a
            gradient.
        calls: number of kernels that are launched to precondition a gradient.
        parts: the tensors of a decomposition.
        rotates: whether gradients are rotated into an eigenbasis, in which moments can be kept.
        damps_identity: whether a decomposition includes the damping. If so, and the layer's other
            factor is the identity, the decomposition is also multiplied by the identity's damped
            inverse.
    """

    words: str
    solver: str
    solver_flops: int
    solver_seconds: str
    step_flops = 0.0
    exact_every = 1
    product_flops = 4
    passes = 6
    calls = 16
    parts: tuple[DecompositionPart, ...]
    rotates = False
    damps_identity = False

    def numel(self, side: Side) -> int:
        """Return the number of fp32 elements that a gradient worker keeps for a side's
        decomposition."""
        return self.wire_numel(side)

    def wire_numel(self, side: Side) -> int:
        """Return the number of elements that are sent for a side's decomposition."""
        return sum(part.numel(side) for part in self.parts)

    def paired(self, damping_kind: str) -> bool:
        """Return whether decomposing a factor needs the layer's other factor on the same rank."""
        return False

    def identity(self, side: Side, device: torch.device) -> Any:
        """Return the decomposition of a side that is the identity."""
        raise NotImplementedError

    def decompose(self, requests: Sequence[Request], **options: Any) -> list[Refreshed]:
        """Decompose factors. Returns the results in the order of the requests. Synchronises with
        the device.

        Args:
            options: the step's ``damping`` and ``damping_kind`` if :attr:`damps_identity`, else
                nothing.
        """
        raise NotImplementedError

    def joined(self, side: Side, *flats: Any) -> Any:
        """Return the decomposition that these flat tensors make up. ``flats`` has a tensor for each
        of ``parts``, or None in place of a tensor without elements."""
        raise NotImplementedError

    def of_layer(self, G: Any, A: Any) -> Any:
        """Combine the decompositions of a layer's two factors into the layer's preconditioner. If
        :attr:`rotates`, it is a :class:`LayerBasis`. Otherwise it is an object with a method
        ``precondition``, such as :class:`LayerInverse`."""
        raise NotImplementedError


def _flat(basis: Eigenbasis) -> Tensor:
    return torch.cat([basis.values[:0], *(vectors.reshape(-1) for vectors in basis.vectors)])


class _Eigen(Method):
    """Method "eigen": each factor's eigenvectors and eigenvalues."""

    words = "eigenbases"
    solver = "eigh"
    solver_flops = 9
    solver_seconds = "eigh_seconds"
    parts = (
        DecompositionPart("eigenvectors", lambda side: side.basis_numel, _flat, True),
        # always sent in fp32, because eigenvalues span too wide a range for 16 bits
        DecompositionPart("eigenvalues", lambda side: side.dim, attrgetter("values"), False),
    )
    rotates = True

    def identity(self, side: Side, device: torch.device) -> Eigenbasis:
        return Eigenbasis((), torch.ones(side.dim, device=device, dtype=torch.float32))

    decompose = staticmethod(refresh_all)  # type: ignore[assignment]  # it has no options
    of_layer = LayerBasis

    def joined(self, side: Side, *flats: Any) -> Eigenbasis:
        flat_vectors, values = flats
        vectors: list[Tensor] = []
        if flat_vectors is not None and side.block > 1:
            parts = flat_vectors.split([count * width**2 for count, width in side.groups])
            for (count, width), part in zip(side.groups, parts, strict=True):
                vectors.append(part.to(torch.float32, copy=True).view(count, width, width))
        return Eigenbasis(tuple(vectors), values.clone())


class _Iterated(_Eigen):
    """Method "eigen" on a GPU, with an update rule that keeps moments in the eigenbasis and rotates
    them when the eigenbasis changes."""

    solver = f"orthogonal iteration, but eigh in the burn-in and every {EXACT_EVERY}th time"
    step_flops = STEP_FLOPS
    exact_every = EXACT_EVERY
    decompose = staticmethod(refresh_from_last)


class _Inverse(Method):
    """Method "inverse": each factor's damped inverse (``curvature/inverse.py``)."""

    words = "inverses"
    solver = "Cholesky"
    solver_flops = 1
    solver_seconds = "cholesky_seconds"
    product_flops = 2
    passes = 4
    calls = 10
    parts = (DecompositionPart("inverses", lambda side: side.numel, packed, False),)
    damps_identity = True
    of_layer = LayerInverse

    def numel(self, side: Side) -> int:
        # a worker keeps both triangles of each block; an identity has no blocks
        return sum(count * width**2 for count, width in side.groups)

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
"""Dict from the value of ``preconditioner.method`` to the method. ``ITERATED`` is not in the dict.
The plan uses ``ITERATED`` in place of "eigen" where it is faster."""
