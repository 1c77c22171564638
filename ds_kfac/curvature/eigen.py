"""Eigenbases of factors and layers, decomposition by eigh with fallbacks, and the precision of a
step's matrix products.

torch cannot set the precision of a single fp32 matrix product, because its switch for the precision
applies to the whole process. We set this switch for a few products and restore it afterwards, even
if an error is raised.

Shape suffixes: D is the width of a side, O and I are the sides of a layer's matrix (outputs and
inputs), and n is a number of blocks of width b.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.ops.functional import block_product

GROUPED = frozenset({"cuda"})
"""Device types on which several matrices of equal width are decomposed in one call of the solver,
because a single small matrix does not keep the device busy."""
BATCHED_UP_TO = 512
"""Largest width of matrices that are decomposed together in one call. A wider matrix keeps the
device busy on its own. According to pytorch issues 174674 and 175585, a batched call was 110 times
as fast as single calls for 500 matrices [100, 100] in fp32, and 32 to 75 times as fast for widths
33 to 128 in fp64. We have not measured this."""
BATCH_NUMEL = 1 << 26
"""Largest total number of elements of all matrices in one call (256 MB in fp32). The solver needs a
workspace of several times this size."""
TOLERANCE = 1e-3
"""Largest relative residual with which a GPU's decomposition is accepted. This limit is well above
fp32 rounding errors, and well below the residual of a wrong decomposition."""

Place = tuple[int, int]
"""Where a group of blocks in a call of the solver comes from: (index of the request, index of the
group in the ``Side.groups`` of the request's factor)."""
BlockEigh = tuple[tuple[Tensor, Tensor] | None, int]
"""Result of decomposing n blocks: ((values [n, b], vectors [n, b, b]), number of failed attempts).
The first entry is None if all attempts failed."""


@dataclass(frozen=True)
class Eigenbasis:
    """The eigendecomposition of a factor: factor = Q diag(values) Q^T, where Q is orthogonal and
    block-diagonal.

    Attributes:
        vectors: the blocks of Q, fp32 [n, b, b] for each group of equally wide blocks, with
            eigenvectors in columns. Empty for a diagonal factor, whose Q is I.
        values: fp32 [D], ascending in each block. Negative values are clamped to 0, because only
            rounding can make an eigenvalue of a second moment negative.
    """

    vectors: tuple[Tensor, ...]
    values: Tensor

    def rounded(self, dtype: torch.dtype) -> "Eigenbasis":
        """Return this eigenbasis with its vectors rounded as if they had been sent in ``dtype``.
        Returns the same object if ``dtype`` is fp32."""
        if dtype is torch.float32:
            return self
        return Eigenbasis(tuple(vectors.to(dtype).float() for vectors in self.vectors), self.values)


@dataclass(frozen=True)
class LayerBasis:
    """The eigenbasis of a layer's Fisher G kron A. The eigenvectors of G act on the rows of the
    gradient dW, and the eigenvectors of A act on its columns.
    :func:`ds_kfac.ops.functional.block_product` explains the blocks of layers with several groups,
    such as grouped convolutions."""

    G: Eigenbasis
    A: Eigenbasis

    def rotate(self, x_OI: Tensor) -> Tensor:
        """Return Q_G^T x Q_A."""
        return block_product([vectors.mT for vectors in self.G.vectors], x_OI, self.A.vectors)

    def restore(self, x_OI: Tensor) -> Tensor:
        """Return Q_G x Q_A^T."""
        return block_product(self.G.vectors, x_OI, [vectors.mT for vectors in self.A.vectors])

    def squared(self) -> "LayerBasis":
        """Return this basis with every entry of Q_G and Q_A squared.

        If a matrix of second moments is diagonal in this basis, and x is its diagonal, then
        ``basis.squared().restore(x)`` is the diagonal of the matrix in the layer's own coordinates.
        """

        def squared(side: Eigenbasis) -> Eigenbasis:
            return Eigenbasis(tuple(v.square() for v in side.vectors), side.values)

        return LayerBasis(squared(self.G), squared(self.A))


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric matrices [n, b, b] by eigh, in their dtype and on their device. Return
    (values, vectors) in fp32."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.float().clamp(min=0), vectors.float().contiguous()


@dataclass(frozen=True)
class Refreshed:
    """Result of decomposing one factor in a refresh.

    Attributes:
        basis: the new decomposition, which is an eigenbasis or a damped inverse, depending on the
            method. None if all attempts failed for at least one block.
        how: how it was computed. The values are "eigh", "iteration" (a step from the previous
            eigenbasis), "cholesky" (an inverse), "diagonal" (there was nothing to decompose,
            because the side is diagonal or the identity), and "failed".
        retries: number of failed attempts.
    """

    basis: Any
    how: Literal["eigh", "iteration", "cholesky", "diagonal", "failed"]
    retries: int = 0


@dataclass(frozen=True)
class Request:
    """A factor to decompose.

    Attributes:
        factor: the factor, which must be :func:`~ds_kfac.curvature.factor.usable`.
        partner: the layer's other factor; None if the method does not need it
            (``curvature/methods.py``).
        last: the factor's previous eigenbasis. One step of iteration computes the new eigenbasis
            from it (``curvature/iteration.py``). If None, the factor is decomposed by eigh.
        alone: whether the factor must be decomposed in a call of its own. This is necessary if
            other ranks decompose copies of the factor, because rounding errors depend on the other
            matrices in a call.
    """

    factor: KroneckerFactor
    partner: KroneckerFactor | None = None
    last: Eigenbasis | None = None
    alone: bool = False

    def to(self, device: torch.device) -> "Request":
        """Return the request with both factors on the device."""
        return replace(
            self, factor=self.factor.to(device), partner=self.partner and self.partner.to(device)
        )


def refresh_all(requests: Sequence[Request]) -> list[Refreshed]:
    """Decompose factors by eigh. Synchronises with the device.

    On a CPU each factor is decomposed in calls of its own, so that its result does not depend on
    the other requests. On a GPU small blocks of equal width are decomposed together in one call of
    the solver.

    Returns the results in the order of the requests.
    """
    share_calls = bool(requests) and grouped(requests[0].factor.packed_P.device)
    solved: dict[Place, BlockEigh] = {}
    for places, parts in calls(requests, widest=BATCHED_UP_TO if share_calls else 0):
        results = _decompose_batch(parts) if len(parts) > 1 else [decomposed(parts[0])]
        solved |= zip(places, results, strict=True)
    return joined(requests, solved, "eigh")


def calls(
    requests: Sequence[Request], *, widest: float = math.inf
) -> Iterator[tuple[list[Place], list[Tensor]]]:
    """Divide the blocks of all requests into calls of a solver.

    All blocks of a call have the same width. A call that several factors share has at most
    :data:`BATCH_NUMEL` elements in total. A side that is diagonal or the identity needs no call.

    Args:
        widest: largest width of blocks that are solved in one call with blocks of other factors.

    Yields two lists of equal length for each call: the places of its groups of blocks, and the
    blocks [n, b, b] of each group.
    """
    all_calls: list[list[Place]] = []
    open_calls: dict[int, list[Place]] = {}  # width -> the call that is not full yet
    for index, request in enumerate(requests):
        side = request.factor.side
        for group, (count, width) in enumerate(side.groups if side.block > 1 else ()):
            call = open_calls.get(width, [])
            blocks = count
            for other, other_group in call:
                blocks += requests[other].factor.side.groups[other_group][0]
            may_share = width <= widest and not request.alone
            if not call or not may_share or blocks * width**2 > BATCH_NUMEL:
                call = []
                all_calls.append(call)
            call.append((index, group))
            if not request.alone:
                open_calls[width] = call
    for call in all_calls:
        factors = [(requests[index].factor, group) for index, group in call]
        yield call, [factor.side.group(factor.packed_P, group) for factor, group in factors]


def joined(
    requests: Sequence[Request],
    solved: Mapping[Place, BlockEigh],
    how: Literal["eigh", "iteration"],
) -> list[Refreshed]:
    """Combine the results of blocks into one result for each request.

    Args:
        solved: dict from each :data:`Place` to the decomposition of its blocks.
        how: how the blocks were decomposed.
    """
    results: list[Refreshed] = []
    for index, request in enumerate(requests):
        side = request.factor.side
        packed_P = request.factor.packed_P
        if side.block < 2:  # a diagonal or an identity, which needs no solver
            values = packed_P.clamp(min=0) if side.block else packed_P.new_ones(side.dim)
            results.append(Refreshed(Eigenbasis((), values), "diagonal"))
            continue
        groups = [solved[index, group] for group in range(len(side.groups))]
        retries = sum(failures for _, failures in groups)
        pairs = [pair for pair, _ in groups if pair is not None]
        if len(pairs) < len(groups):
            results.append(Refreshed(None, "failed", retries))
            continue
        vectors = tuple(vectors for _, vectors in pairs)
        values = torch.cat([values.reshape(-1) for values, _ in pairs])
        results.append(Refreshed(Eigenbasis(vectors, values), how, retries))
    return results


def _decompose_batch(parts: Sequence[Tensor]) -> list[BlockEigh]:
    """Decompose several tensors of blocks, [n_i, b, b] with the same b, in one call of the solver.
    A tensor whose result is not valid is decomposed again, in a call of its own."""
    blocks = torch.cat(list(parts))
    check = functools.partial(passes_residual_check, blocks)
    try:
        values, vectors = eigh(blocks)
        valid = passed((values, vectors), check, blocks.device).cpu()
    except RuntimeError:
        return [decomposed(part) for part in parts]
    sizes = [len(part) for part in parts]
    split = zip(parts, valid.split(sizes), values.split(sizes), vectors.split(sizes), strict=True)
    results: list[BlockEigh] = []
    for part, part_valid, part_values, part_vectors in split:
        if bool(part_valid.all()):
            # copies, because a view would keep the batch in memory, and in checkpoints
            results.append(((part_values.clone(), part_vectors.clone()), 0))
        else:
            results.append(decomposed(part))
    return results


def grouped(device: torch.device) -> bool:
    """Return whether several small matrices are decomposed in one call on this device."""
    return device.type in GROUPED


def decomposed(blocks: Tensor) -> BlockEigh:
    """Decompose blocks [n, b, b] by eigh, with the attempts of :func:`with_fallbacks`. The caller
    must have checked that the blocks are finite. For NaN, LAPACK silently returns NaN, and cuSOLVER
    may or may not raise an error."""
    return with_fallbacks(blocks, eigh, functools.partial(passes_residual_check, blocks))


def with_fallbacks(
    blocks: Tensor, solve: Callable[[Tensor], tuple[Tensor, ...]], check: Callable[..., Tensor]
) -> tuple[Any, int]:
    """Call ``solve`` for blocks in up to three attempts: in the blocks' dtype, in float64, and, if
    the blocks are on a GPU, in float64 on the CPU. Each later attempt runs only if the one before
    it raised an error or gave an invalid result. Synchronises once per attempt.

    Args:
        blocks: [n, b, b].
        check: see :func:`passed`.

    Returns two values: the first valid result, on the device of ``blocks``, or None if all attempts
    failed; and the number of failed attempts.
    """
    device = blocks.device
    attempts = [(device, blocks.dtype), (device, torch.float64)]
    if device.type != "cpu":
        attempts.append((torch.device("cpu"), torch.float64))
    for failures, (place, dtype) in enumerate(attempts):
        try:
            result = tuple(part.to(device) for part in solve(blocks.to(place, dtype)))
            if bool(passed(result, check, device).all()):
                return result, failures
        except RuntimeError:
            # LinAlgError, an error of cuSOLVER, or out of memory: the next attempt is more exact or
            # runs elsewhere
            continue
    return None, len(attempts)


def passed(result: Sequence[Tensor], check: Callable[..., Tensor], device: torch.device) -> Tensor:
    """Check for each block whether its result is valid. A valid result is finite and, on a GPU,
    passes the residual check. Returns bool [n].

    Args:
        result: tensors [n, ..].
        check: residual check. It takes the result's tensors and returns bool [n].
        device: device of the blocks. If it is a GPU, the residual check also applies to results
            that were computed on the CPU.
    """
    largest = [torch.linalg.vector_norm(part.flatten(1), math.inf, dim=1) for part in result]
    finite = torch.isfinite(torch.stack(largest)).all(0)
    return finite & check(*result) if grouped(device) else finite


def probe(blocks: Tensor) -> Tensor:
    """Return a fixed vector for residual checks, fp32 [b]. It is irregular, so that a factor is
    unlikely to have the same pattern."""
    numbers = torch.arange(blocks.shape[-1], device=blocks.device, dtype=torch.float32)
    return torch.cos(1.0 + numbers**2)


def passes_residual_check(blocks: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Check for each block whether Q Q^T x = x and Q^T C x = diag(values) Q^T x for one vector x
    (Freivalds' check), where C is the block and Q its ``vectors``. Returns bool [n].

    On a GPU, torch.linalg.eigh may return vectors that are not orthogonal without raising an error
    (pytorch issue 192483). The check takes O(b^2) elementwise operations. It does not use matrix
    products, because TF32 could round their operands.
    """
    x = probe(blocks)
    rotated = (vectors * x.unsqueeze(-1)).sum(-2)
    restored = (vectors * rotated.unsqueeze(-2)).sum(-1)
    orthogonal = (restored - x).norm(dim=-1) <= TOLERANCE * x.norm()
    image = (blocks * x).sum(-1)
    residual = (vectors * image.unsqueeze(-1)).sum(-2) - values * rotated
    allowed = TOLERANCE * blocks.flatten(1).norm(dim=-1) * x.norm()
    return orthogonal & (residual.norm(dim=-1) <= allowed)


TF32_CAPABILITY = (8, 0)
"""The lowest compute capability of a GPU that has TF32."""


@dataclass(frozen=True)
class Precision:
    """Precision of the matrix products that precondition a gradient.

    Attributes:
        name: "highest" or "tf32".
        products: "ieee" (fp32), or "tf32", which rounds the mantissas of operands to 10 bits.
        why: text for the report. It explains the precision if the config does not set it, or if the
            device does not support the precision that the config sets.
    """

    name: str = "highest"
    products: Literal["ieee", "tf32"] = "ieee"
    why: str = ""

    def __str__(self) -> str:
        format_name = "TF32" if self.products == "tf32" else "fp32"
        why = f"; {self.why}" if self.why else ""
        return f"{self.name} ({format_name}{why})"


HIGHEST = Precision()


def choose(requested: str | None, device: torch.device) -> Precision:
    """Return the precision of a run.

    Args:
        requested: "highest", "tf32", or None. None means TF32 if the device has it, else fp32.
    """
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY
    if requested is None:
        if has_tf32:
            return Precision("tf32", "tf32", why="chosen")
        return Precision(why="chosen, because this device has no TF32")
    if requested == "highest":
        return HIGHEST
    if has_tf32:
        return Precision(requested, "tf32")
    why = f"WARNING: no TF32 on this {device.type}, so fp32 is used"
    return Precision(requested, "ieee", why)


@contextmanager
def fp32_products(how: Literal["ieee", "tf32"], device: torch.device) -> Iterator[None]:
    """Inside this context, compute products of fp32 operands on a device in "ieee" (fp32) or
    "tf32", whatever the process has set.

    If the process has set one precision for all backends, matrix products get that precision back
    after the context, but as a separate setting.
    """
    switch = _switch(device.type)
    if switch.fp32_precision == how or (how == "ieee" and switch.fp32_precision == "none"):
        yield
        return
    before = switch.fp32_precision
    switch.fp32_precision = how
    try:
        yield
    finally:
        switch.fp32_precision = before


class _OldSwitch:
    """Gives the precision switch of torch before 2.9 the interface of the new switch."""

    NAMES: ClassVar = {"ieee": "highest", "tf32": "high"}

    @property
    def fp32_precision(self) -> str:
        value = torch.get_float32_matmul_precision()
        return {"highest": "ieee", "high": "tf32"}.get(value, value)

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(self.NAMES.get(value, value))


@functools.cache
def _switch(device_type: str) -> Any:
    """Return the object whose ``fp32_precision`` sets the precision of products on a device."""
    backend: Any = torch.backends.cuda.matmul
    if device_type != "cuda":
        backend = getattr(torch.backends.mkldnn, "matmul", None)
    return backend if hasattr(backend, "fp32_precision") else _OldSwitch()
