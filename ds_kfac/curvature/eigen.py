"""Eigenbases: of a side, of a layer, how they are found, and what is done where a decomposition fails; and in which
precision a step's products run.

torch has no precision of a single fp32 product, only a switch of the process. Ours is held around a few products and
given back, also after an error; what needs it exact at the same time, on another thread, holds the same lock.

Shape suffixes: D a side's width, O and I the sides of a layer's matrix, n blocks of width b.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.ops.functional import block_product

GROUPED = frozenset({"cuda"})
"""Device types where matrices of one width are decomposed in one call: it is not filled by one small matrix."""
STACKED_UP_TO = 512
"""Widest that share a call. A batched call was 110 times as fast as one by one for 500 x [100, 100] in fp32, 32 to 75
times for b = 33..128 in fp64 (pytorch issues 174674, 175585); wider ones fill the device. Not measured by us."""
STACK_NUMEL = 1 << 26
"""Elements of a stack at most (256 MB in fp32); the solver's workspace is a multiple of it."""
TOLERANCE = 1e-3
"""Of a decomposition by a GPU: far above fp32 rounding, far below what a wrong one shows."""

Found = tuple[tuple[Tensor, Tensor] | None, int]
"""(values [n, b], vectors [n, b, b]), None when every rung of the ladder failed; and attempts that failed."""
T = TypeVar("T")


@dataclass(frozen=True)
class Eigenbasis:
    """factor = Q diag(values) Q^T with an orthogonal, block-diagonal Q.

    Attributes:
        vectors: fp32 [n, b, b] per group of equal blocks, eigenvectors in columns; empty if Q is the identity, as it
            is for a diagonal factor.
        values: fp32 [D], ascending in each block, clamped at 0: a second moment has no negative ones but by rounding.
    """

    vectors: tuple[Tensor, ...]
    values: Tensor

    @property
    def nbytes(self) -> int:
        return sum(vectors.nbytes for vectors in self.vectors) + self.values.nbytes

    def rounded(self, dtype: torch.dtype) -> "Eigenbasis":
        """With vectors as they are after travelling in ``dtype``; itself in fp32."""
        if dtype is torch.float32:
            return self
        return Eigenbasis(tuple(vectors.to(dtype).float() for vectors in self.vectors), self.values)


@dataclass(frozen=True)
class LayerBasis:
    """The eigenbasis of a layer's Fisher, G kron A: rows by G, columns by A; of a layer in groups see
    :func:`product`."""

    G: Eigenbasis
    A: Eigenbasis

    def rotate(self, x_OI: Tensor) -> Tensor:
        """Q_G^T x Q_A."""
        return block_product([vectors.mT for vectors in self.G.vectors], x_OI, self.A.vectors)

    def restore(self, x_OI: Tensor) -> Tensor:
        """Q_G x Q_A^T."""
        return block_product(self.G.vectors, x_OI, [vectors.mT for vectors in self.A.vectors])

    def squared(self) -> "LayerBasis":
        """Every entry of both Q squared: how a diagonal of second moments leaves a basis."""
        return LayerBasis(
            *(Eigenbasis(tuple(v.square() for v in side.vectors), side.values) for side in (self.G, self.A))
        )


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Exact decomposition of [n, b, b] in its own dtype and place; (values, vectors) in fp32."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.float().clamp(min=0), vectors.float().contiguous()


@dataclass(frozen=True)
class Refreshed(Generic[T]):
    """What a refresh came to.

    Attributes:
        basis: what ``METHODS`` says is kept; None when every rung of the ladder failed for some block.
        how: "eigh", "iteration" (a step from the last eigenbasis), "cholesky" (an inverse), "diagonal" (of a
            diagonal or identity side, nothing to decompose), "failed".
        retries: rungs of the ladder that failed.
    """

    basis: T | None
    how: Literal["eigh", "iteration", "cholesky", "diagonal", "failed"]
    retries: int = 0


@dataclass(frozen=True)
class Request:
    """A usable factor to decompose.

    Attributes:
        partner: the layer's other factor, where a method needs it (``curvature/methods.py``).
        last: the eigenbasis to iterate from (``curvature/iteration.py``); None: by eigh.
        alone: whether it is iterated by itself: other ranks have copies, and others beside it.
    """

    factor: KroneckerFactor
    partner: KroneckerFactor | None = None
    last: Eigenbasis | None = None
    alone: bool = False

    def to(self, device: torch.device) -> "Request":
        """With its factors there, where a last basis is."""
        return replace(self, factor=self.factor.to(device), partner=self.partner and self.partner.to(device))


def refresh_all(requests: Sequence[Request]) -> list[Refreshed]:
    """Decompose factors, in the order given. Synchronises with the device, as every decomposition does.

    On a CPU each by itself, so that a result does not depend on what else is decomposed; on a GPU small ones together.
    """
    sides = [request.factor.side for request in requests]
    places = [
        (number, group)
        for number, side in enumerate(sides)
        for group in range(len(side.groups) if side.block > 1 else 0)
    ]
    found: dict[tuple[int, int], Found] = {}
    for call in _calls([sides[number].groups[group] for number, group in places], requests):
        stack = [places[index] for index in call]
        blocks = [sides[number].group(requests[number].factor.packed_P, group) for number, group in stack]
        found |= zip(stack, _together(blocks) if len(blocks) > 1 else [decomposed(blocks[0])], strict=True)
    results: list[Refreshed] = []
    for number, (request, side) in enumerate(zip(requests, sides, strict=True)):
        if side.block < 2:  # no solver
            kept = request.factor.packed_P
            values = kept.clamp(min=0) if side.block else kept.new_ones(side.dim)
            results.append(Refreshed(Eigenbasis((), values), "diagonal"))
            continue
        own = [found[number, group] for group in range(len(side.groups))]
        retries, pairs = sum(failures for _, failures in own), [pair for pair, _ in own if pair is not None]
        if len(pairs) < len(own):
            results.append(Refreshed(None, "failed", retries))
            continue
        values = torch.cat([values.reshape(-1) for values, _ in pairs])
        results.append(Refreshed(Eigenbasis(tuple(vectors for _, vectors in pairs), values), "eigh", retries))
    return results


def _calls(shapes: Sequence[tuple[int, int]], requests: Sequence[Request]) -> list[list[int]]:
    """Indices of the (n, b) that are decomposed together."""
    if not shapes or not grouped(requests[0].factor.packed_P.device):
        return [[index] for index in range(len(shapes))]
    load_solvers(requests[0].factor.packed_P.device)
    calls: list[list[int]] = []
    filling: dict[int, list[int]] = {}
    for index, (count, width) in enumerate(shapes):
        stack = filling.get(width, [])
        numel = sum(shapes[other][0] for other in stack) * width**2
        if not stack or width > STACKED_UP_TO or numel + count * width**2 > STACK_NUMEL:
            stack = filling[width] = []
            calls.append(stack)
        stack.append(index)
    return calls


def _together(parts: Sequence[Tensor]) -> list[Found]:
    """Of equally wide blocks in one call; those it fails for once more, each by itself."""
    stack = torch.cat(list(parts))
    try:
        values, vectors = eigh(stack)
        right = _right(stack, values, vectors).cpu()
    except RuntimeError:
        return [decomposed(part) for part in parts]
    sizes = [len(part) for part in parts]
    split = zip(parts, right.split(sizes), values.split(sizes), vectors.split(sizes), strict=True)
    # copies: a view would keep the whole stack in memory, and in checkpoints, as long as any of them
    return [((own.clone(), of.clone()), 0) if bool(yes.all()) else decomposed(part) for part, yes, own, of in split]


def grouped(device: torch.device) -> bool:
    """Whether small matrices are decomposed together on this device."""
    return device.type in GROUPED


def decomposed(blocks: Tensor) -> Found:
    """Up the ladder of :func:`climb`. The input is checked by the caller (LAPACK returns NaN for NaN without a word,
    cuSOLVER raises or does not)."""
    return climb(blocks, eigh, functools.partial(_right, blocks))


def climb(
    blocks: Tensor, attempt: Callable[[Tensor], tuple[Tensor, ...]], right: Callable[..., Tensor]
) -> tuple[Any, int]:
    """What is found of blocks as given, else in float64, else in float64 on the CPU, on their device; and how many of
    these failed: raised, or found what cannot be right. None where all did. Synchronises once each.

    Args:
        right: of what was found, bool [n].
    """
    device, ladder = blocks.device, [(blocks.device, blocks.dtype), (blocks.device, torch.float64)]
    if device.type != "cpu":
        ladder.append((torch.device("cpu"), torch.float64))
    for failures, (place, dtype) in enumerate(ladder):
        try:
            found = tuple(part.to(device) for part in attempt(blocks.to(place, dtype)))
            if bool(right(*found).all()):
                return found, failures
        except RuntimeError:  # LinAlgError, cuSOLVER's own, out of memory: the next is more exact, smaller or elsewhere
            continue
    return None, len(ladder)


def _right(blocks: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Bool [n]: whether a decomposition can be right."""
    right = torch.isfinite(values).all(-1) & torch.isfinite(vectors).flatten(1).all(-1)
    return right & credible(blocks, values, vectors) if blocks.device.type in GROUPED else right


def probe(blocks: Tensor) -> Tensor:
    """The vector that results are checked with, fp32 [b]: no pattern of its own."""
    return torch.cos(1.0 + torch.arange(blocks.shape[-1], device=blocks.device, dtype=torch.float32) ** 2)


def credible(blocks: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Bool [n]: whether Q Q^T x = x and Q^T C x = diag(values) Q^T x, for one x (Freivalds' check).

    torch.linalg.eigh has returned vectors that are not orthogonal from a GPU without an error (pytorch issue 192483).
    Elementwise, O(b^2): no product that TF32 could touch.
    """
    x = probe(blocks)
    rotated = (vectors * x.unsqueeze(-1)).sum(-2)
    right = ((vectors * rotated.unsqueeze(-2)).sum(-1) - x).norm(dim=-1) <= TOLERANCE * x.norm()
    image = (blocks * x).sum(-1)
    off = (vectors * image.unsqueeze(-1)).sum(-2) - values * rotated
    return right & (off.norm(dim=-1) <= TOLERANCE * blocks.flatten(1).norm(dim=-1) * x.norm())


_LOADING = threading.Lock()


@functools.cache
def _loaded(device: torch.device) -> None:
    torch.linalg.eigh(torch.ones(1, 1, 1, device=device))


def load_solvers(device: torch.device) -> None:
    """torch loads its CUDA solvers at the first call, and fails if two threads make it (pytorch issue 90613)."""
    if device.type == "cuda":
        with _LOADING:
            _loaded(device)


SWITCH = threading.RLock()
"""Held while the switch is not what the process set; hold it where products must not see ours."""
TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Precision:
    """Of the products that precondition a gradient.

    Attributes:
        name: "highest" or "tf32".
        products: fp32, or TF32, which rounds operands to 10 bits.
        why: for people, where it is not what was asked for, or was not asked for.
    """

    name: str = "highest"
    products: Literal["ieee", "tf32"] = "ieee"
    why: str = ""

    def __str__(self) -> str:
        kind = "TF32" if self.products == "tf32" else "fp32"
        return f"{self.name} ({kind}{'; ' + self.why if self.why else ''})"


HIGHEST = Precision()


def choose(asked: str | None, device: torch.device) -> Precision:
    """The precision of a run.

    Args:
        asked: "highest", "tf32", or None: TF32 where the device has it.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY
    if asked is None:
        return Precision("tf32", "tf32", why="chosen") if able else Precision(why="chosen: no TF32 here")
    if asked == "highest":
        return HIGHEST
    why = "" if able else f"WARNING: no TF32 on this {device.type}, fp32 in its place"
    return Precision(asked, "tf32" if able else "ieee", why)


@contextmanager
def fp32_products(how: Literal["ieee", "tf32"], device: torch.device) -> Iterator[None]:
    """Run products of fp32 operands on a device as "ieee" (fp32) or "tf32", whatever the process has set.

    What a process set for all backends at once is read, and given back, as set for products alone.
    """
    switch = _switch(device.type)
    if switch.fp32_precision == how or (how == "ieee" and switch.fp32_precision == "none"):
        yield
        return
    with SWITCH:
        before, switch.fp32_precision = switch.fp32_precision, how
        try:
            yield
        finally:
            switch.fp32_precision = before


class _OldSwitch:
    """torch's before 2.9."""

    NAMES: ClassVar = {"ieee": "highest", "tf32": "high"}

    @property
    def fp32_precision(self) -> str:
        value = torch.get_float32_matmul_precision()
        return {"highest": "ieee", "high": "tf32"}.get(value, value)

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(self.NAMES.get(value, value))


@functools.cache
def _switch(kind: str) -> Any:
    backend: Any = torch.backends.cuda.matmul if kind == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    return backend if hasattr(backend, "fp32_precision") else _OldSwitch()
