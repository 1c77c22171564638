"""The tasks of a step and what they cost in seconds and bytes.

:class:`CostModel` converts each kind of work into seconds. :class:`FactorSpec` describes a factor
separately from layers, because layers with the same input share an A. :class:`Work` gives the
seconds per step and the bytes of each task on the rank that performs it. All functions are pure, so
that every rank makes the same plan from the same numbers.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.methods import EIGEN, ITERATED, Method
from ds_kfac.model.layers import LayerSpec, key_of

ELEMENT_BYTES = 4
"""Bytes of an element. All state is fp32, and all messages are assumed to be fp32."""
FOLD_CALLS, FOLD_PASSES = 10, 6
"""Number of kernels, and number of passes over memory, to add one batch sum to a factor's running
average."""
Workers = Mapping[str, tuple[int, ...]]
"""Layer name -> ranks that precondition the layer's gradient, in ascending order."""
Table = tuple[tuple[int, float], ...]
"""(size, value) pairs, in ascending order of size."""


def capture_flops(side: Side, rows: int) -> int:
    """Return the FLOPs to compute the side's blocks of the symmetric product x^T x, where x has
    ``rows`` rows."""
    return sum(rows * count * width * (width + 1) for count, width in side.groups)


def decompose_flops(side: Side, method: Method = EIGEN) -> int:
    """Return the FLOPs of a decomposition. A block of width n takes 9 n^3 for eigh by
    tridiagonalisation (Golub & Van Loan, 8.3), or n^3 for an inverse by Cholesky. A diagonal takes
    0."""
    if side.block > 1:
        return sum(method.solver_flops * count * width**3 for count, width in side.groups)
    return 0


def precondition_flops(layer: LayerSpec, method: Method = EIGEN) -> int:
    """Return the FLOPs of rotating a gradient into the eigenbasis and back, which are 4 O I (O + I)
    for dense sides. Multiplying by inverses takes half as many."""
    numel = layer.G.dim * layer.A.basis_numel + layer.A.dim * layer.G.basis_numel
    return method.product_flops * numel // layer.groups


@dataclass(frozen=True)
class CostModel:
    """Rates of a device and of the links between ranks. All its methods except :meth:`rate` return
    seconds.

    Attributes:
        eigh_seconds, cholesky_seconds: (n, seconds) pairs, in ascending order of n, for one fp32
            eigh or one inverse by Cholesky of an n x n matrix. Between two sizes, the time is
            interpolated by a power of n. Below the first size, the time is constant, since a call
            takes that long at least. Above the last size, the time grows with n^3.
        gemm_flops: fp32 FLOP/s of a large matrix product.
        product_flops: (n, FLOP/s) pairs for products of n x n matrices; empty: ``gemm_flops`` at
            all sizes.
        syrk_flops: FLOP/s of x^T x. A product of a matrix x with D columns counts as (number of
            rows) D (D + 1) FLOPs.
        copy_bytes: bytes per second that elementwise work reads and writes.
        call_seconds: seconds to start a kernel.
        link_bytes: bytes per second between ranks, in each direction. If ``node_bytes`` is not 0,
            ``link_bytes`` applies only between nodes.
        link_seconds: latency of a message, in seconds.
        node_size: number of consecutive ranks on a node.
        node_bytes: bytes per second between ranks of one node, in each direction; 0: the same as
            ``link_bytes``.
        model_flops: FLOP/s of the model's forward and backward passes, and of products in 16 bits;
            0: the same as ``gemm_flops``.
        node_cores: number of decompositions that the ranks of a node can run at once; 0: each rank
            has its own device.
        ieee_flops: FLOP/s of large fp32 products without TF32, as orthogonal iteration uses them.
            If it is 0, the iteration is not faster than eigh, and the plan does not use it.
        gpu: whether the device is a GPU.
        measured: names of the attributes that the user has measured. All other attributes have
            built-in values.
    """

    eigh_seconds: Table
    cholesky_seconds: Table
    gemm_flops: float
    syrk_flops: float
    copy_bytes: float
    call_seconds: float
    link_bytes: float
    link_seconds: float
    node_size: int = 1
    node_bytes: float = 0.0
    model_flops: float = 0.0
    node_cores: int = 0
    gpu: bool = False
    product_flops: Table = ()
    ieee_flops: float = 0.0
    measured: frozenset[str] = frozenset()

    def rate(self, width: float) -> float:
        """Return the FLOP/s of a product of matrices with ``width`` rows and columns. Between two
        sizes of the table, the rate is interpolated by a power of the width. Outside of the table,
        the rate of the nearest size is used."""
        if not self.product_flops:
            return self.gemm_flops
        sizes = [size for size, _ in self.product_flops]
        return _interpolated(self.product_flops, min(max(width, sizes[0]), sizes[-1]))

    def step(self, width: int, method: Method = ITERATED) -> float:
        """Return the seconds of one step of orthogonal iteration. A step consists of products,
        solves and two Cholesky factorizations. The two factorizations together take 2/3 of the time
        of an inverse by Cholesky."""
        products = (method.step_flops - 2 / 3) * width**3 / min(self.ieee_flops, self.rate(width))
        return products + 2 / 3 * _interpolated(self.cholesky_seconds, width)

    def elementwise(self, nbytes: float, calls: int = 1) -> float:
        return nbytes / self.copy_bytes + calls * self.call_seconds

    def transfer(self, nbytes: float, *, within_node: bool = False) -> float:
        """Return the seconds to send ``nbytes`` between two ranks, without latency. A message
        contains the data of many layers, so the latency per layer is negligible."""
        return nbytes / (self.node_bytes if within_node and self.node_bytes else self.link_bytes)

    def decompose(self, side: Side, method: Method = EIGEN) -> float:
        """Return the seconds of a factor's refresh, averaged over the refreshes after the burn-in.
        A diagonal factor needs only elementwise work, because its eigenbasis is the identity."""
        if side.block <= 1:
            return sum(self.elementwise(2 * ELEMENT_BYTES * count) for count, _ in side.groups)
        total = 0.0
        for count, width in side.groups:
            seconds = _interpolated(getattr(self, method.solver_seconds), width)
            if method.step_flops:
                seconds += (1 - 1 / method.exact_every) * min(
                    0.0, self.step(width, method) - seconds
                )
            total += count * seconds
        return total

    def precondition(self, layer: LayerSpec, method: Method = EIGEN) -> float:
        """Return the seconds to precondition a layer's gradient: to rotate, divide and rotate back,
        or to multiply by both inverses."""
        seconds = precondition_flops(layer, method) / self.rate(mean_width(layer))
        return seconds + self.elementwise(method.passes * ELEMENT_BYTES * layer.numel, method.calls)

    def fold(self, side: Side) -> float:
        """Return the seconds to add one batch sum to a factor's running average."""
        return self.elementwise(FOLD_PASSES * ELEMENT_BYTES * side.numel, FOLD_CALLS)


def mean_width(layer: LayerSpec) -> float:
    """Return the width of a square matrix with as many elements as one group of the layer's
    weight."""
    return (layer.numel / layer.groups) ** 0.5


def _interpolated(table: Table, n: float) -> float:
    """Return the value of a table at size n, interpolated as :class:`CostModel` describes for
    ``eigh_seconds``."""
    sizes = [size for size, _ in table]
    right = bisect_right(sizes, n)
    if right == 0:
        return table[0][1]
    size, seconds = table[right - 1]
    power = 3.0
    if right < len(sizes):
        next_size, next_seconds = table[right]
        power = math.log(next_seconds / seconds) / math.log(next_size / size)
    return seconds * (n / size) ** power


# Measured on one thread of a Xeon (Cascade Lake) at 2.5 GHz with torch 2.13; medians. The link was
# not measured: 10 Gbit/s is assumed.
_CPU = CostModel(
    eigh_seconds=(
        (16, 41e-6),
        (64, 0.42e-3),
        (256, 6.0e-3),
        (512, 25e-3),
        (1024, 0.15),
        (2048, 0.99),
    ),
    cholesky_seconds=(
        (16, 71e-6),
        (64, 0.21e-3),
        (256, 1.5e-3),
        (512, 6.7e-3),
        (1024, 43e-3),
        (2048, 0.26),
    ),
    gemm_flops=1.2e11,
    syrk_flops=4.8e10,
    copy_bytes=1.1e10,
    call_seconds=8e-6,
    link_bytes=1.25e9,
    link_seconds=50e-6,
)
# Measured on an H100 80GB HBM3 with torch 2.11 and TF32 products, by benchmarks/kernels/costs.py
# and a step of GPT-2 small in benchmarks/step.py. The links were not measured: 200 Gbit/s between
# nodes and 1600 Gbit/s within a node are assumed.
_CUDA = CostModel(
    eigh_seconds=(
        (16, 0.15e-3),
        (64, 0.63e-3),
        (256, 3.7e-3),
        (512, 10.5e-3),
        (1024, 10.8e-3),
        (2048, 26e-3),
        (4096, 98e-3),
        (8192, 0.54),
    ),
    cholesky_seconds=(
        (16, 0.13e-3),
        (64, 0.14e-3),
        (256, 0.32e-3),
        (512, 0.56e-3),
        (1024, 1.16e-3),
        (2048, 2.6e-3),
        (4096, 8.3e-3),
        (8192, 41e-3),
    ),
    product_flops=(
        (64, 6.7e10),
        (128, 6.9e11),
        (256, 4.6e12),
        (512, 2.8e13),
        (1024, 1.3e14),
        (2048, 3.4e14),
        (4096, 4e14),
    ),
    gemm_flops=4e14,
    syrk_flops=2.7e14,
    copy_bytes=3e12,
    call_seconds=3.8e-6,
    link_bytes=2.5e10,
    link_seconds=20e-6,
    node_bytes=2e11,
    model_flops=2.7e14,
    gpu=True,
    ieee_flops=5e13,
)
BUILTIN: Mapping[str, CostModel] = {"cpu": _CPU, "cuda": _CUDA}
"""Device type -> the cost model that is used if the user has measured nothing."""


TABLES = ("eigh_seconds", "cholesky_seconds", "product_flops")
RATES = [
    "gemm_flops",
    "ieee_flops",
    "syrk_flops",
    "copy_bytes",
    "call_seconds",
    "link_bytes",
    "link_seconds",
    "node_bytes",
]


def measured(costs: CostModel, path: str) -> CostModel:
    """Return ``costs`` with the measured values of a file.

    ``python -m benchmarks.kernels.costs`` writes the file. It is a JSON object whose keys are
    fields of :class:`CostModel`. Tables are lists of [size, value]. Fields that are missing in the
    file keep their values. The key "machine" describes the machine for people and is ignored.

    Raises:
        ValueError: the file does not exist, or does not have this format.
    """
    fields: dict[str, Any] = {}
    try:
        content = json.loads(Path(path).read_text())
        if not isinstance(content, dict):
            raise ValueError("not an object")
        for name in content.keys() - {"machine"}:
            if name not in (*TABLES, *RATES):
                raise ValueError(f"{name} is none of {', '.join((*TABLES, *RATES))}")
            if name not in TABLES:
                fields[name] = _positive(content[name])
                continue
            table = fields[name] = tuple(
                (int(_positive(size)), _positive(value)) for size, value in content[name]
            )
            if not table or [size for size, _ in table] != sorted({size for size, _ in table}):
                raise ValueError(f"{name}: sizes must be in ascending order, each only once")
    except (OSError, ValueError, TypeError) as problem:
        raise ValueError(
            f"--costs {path}: {problem}; python -m benchmarks.kernels.costs writes a valid file"
        ) from None
    return replace(costs, **fields, measured=frozenset(fields))


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return float(value)


@dataclass(frozen=True)
class FactorSpec:
    """A factor of one or several layers. A side that is the identity has no factor.

    Attributes:
        key: "<layer>/A" or "<layer>/G", with the name of the first layer that has the factor.
        layers: names of the layers that have the factor. If several layers have the same input,
            they share their A.
    """

    key: str
    side: Side
    layers: tuple[str, ...]

    @property
    def is_A(self) -> bool:
        return self.key.endswith("/A")


def factor_specs(
    layers: Sequence[LayerSpec], shared: Sequence[Sequence[str]] = ()
) -> tuple[FactorSpec, ...]:
    """Return all factors in module order, with a layer's A before its G.

    Some layers have no A of their own. A layer whose ``shares`` names another layer uses the A of
    that layer. Each entry of ``shared`` is a group of names of layers with the same input. These
    layers use the A of the group's first layer.
    """
    leader = {name: group[0] for group in shared for name in group}
    users: dict[str, list[str]] = {}
    sides: dict[str, Side] = {}
    for layer in layers:
        for which, side in (("A", layer.A), ("G", layer.G)):
            if side.block == 0:
                continue
            owner = leader.get(layer.name) or layer.shares or layer.name
            key = key_of(owner if which == "A" else layer.name, which)
            first_side = sides.setdefault(key, side)
            assert first_side == side, f"the A of {layer.name} has another shape than {key}"
            users.setdefault(key, []).append(layer.name)
    return tuple(FactorSpec(key, sides[key], tuple(users[key])) for key in users)


def factors_by_layer(factors: Sequence[FactorSpec]) -> Mapping[str, Mapping[str, FactorSpec]]:
    """Return a dict from layer name to {"A": factor, "G": factor}. Sides that are the identity are
    left out."""
    by_layer: dict[str, dict[str, FactorSpec]] = {}
    for factor in factors:
        for layer in factor.layers:
            by_layer.setdefault(layer, {})["A" if factor.is_A else "G"] = factor
    return by_layer


def packed_bytes(side: Side) -> int:
    """Return the bytes of a factor's running average, which consists of packed triangles in fp32
    and a counter."""
    return 4 * side.numel + 4


def basis_bytes(side: Side, method: Method) -> int:
    """Return the bytes of a factor's decomposition in fp32."""
    return 4 * method.numel(side)


@dataclass(frozen=True)
class Work:
    """The cost of every task that can be assigned to a rank, in seconds per step. The cost of a
    task that does not run in every step is divided by its interval.

    A message costs time on its sender and on its receiver. If several ranks receive the same data,
    the sender spends the time once for each of them. Results are sent and received at the same
    time, so only the longer direction counts. Capturing and sending batch sums are left out,
    because their cost is the same on all ranks.

    Attributes:
        held: layer name -> for each rank, the number of elements of the layer's gradient that the
            rank holds; None: all ranks hold all gradients.
        moments: number of fp32 tensors [O, I] that a worker keeps for a layer (0, 1 or 2).
        method: how factors are decomposed.
    """

    layers: Sequence[LayerSpec]
    factors: Sequence[FactorSpec]
    world: int
    held: Mapping[str, Sequence[int]] | None
    costs: CostModel
    update_interval: int
    refresh_interval: int
    moments: int = 0
    method: Method = EIGEN

    @cached_property
    def used(self) -> Mapping[str, tuple[FactorSpec, ...]]:
        """Layer name -> factors of the layer. A layer whose two sides are identities has no
        factors."""
        by_layer = factors_by_layer(self.factors)
        return {layer.name: tuple(by_layer.get(layer.name, {}).values()) for layer in self.layers}

    @cached_property
    def precondition(self) -> Mapping[str, float]:
        """Layer name -> seconds per step that each of its workers spends on preconditioning."""
        return {layer.name: self.costs.precondition(layer, self.method) for layer in self.layers}

    @cached_property
    def factor(self) -> Mapping[str, float]:
        """Factor key -> seconds per step on the owner, which receives batch sums, adds them
        to the running average, and decomposes the factor."""
        return {
            factor.key: (
                self.costs.transfer(packed_bytes(factor.side)) + self.costs.fold(factor.side)
            )
            / self.update_interval
            + self.costs.decompose(factor.side, self.method) / self.refresh_interval
            for factor in self.factors
        }

    def travel(self, factor: FactorSpec, *, within_node: bool = False) -> float:
        """Return the seconds per step that sender and receiver each spend on sending a factor's
        eigenbasis to one rank."""
        nbytes = ELEMENT_BYTES * self.method.wire_numel(factor.side)
        return self.costs.transfer(nbytes, within_node=within_node) / self.refresh_interval

    def moved(self, layer: LayerSpec, rank: int, workers: int = 1) -> float:
        """Return the seconds per step that a layer's worker spends on moving gradients and results.

        If gradients are partitioned, the worker receives the parts of the gradient that it lacks,
        and sends back their results. If gradients are replicated, the worker sends the result to
        the other ranks of its row.
        """
        if self.held is not None:
            missing = max(0, layer.numel - self.held[layer.name][rank])
            return self.costs.transfer(2 * ELEMENT_BYTES * missing)
        nbytes = ELEMENT_BYTES * layer.numel
        width = self.world // workers
        within = min(width, self.costs.node_size) - 1
        sends = within * self.costs.transfer(nbytes, within_node=True)
        return sends + (width - 1 - within) * self.costs.transfer(nbytes)

    def worker_bytes(self, layer: LayerSpec) -> tuple[int, int, int]:
        """Return the bytes of a layer on each of its workers as a triple: eigenvalues of sides that
        are identities; moments and their counter; gradient and result during a step. Factors are
        not included."""
        ones = sum(basis_bytes(side, self.method) for side in (layer.A, layer.G) if side.block == 0)
        return (
            ones,
            4 * self.moments * layer.numel + 4 if self.moments else 0,
            2 * ELEMENT_BYTES * layer.numel,
        )

    def loads(self, workers: Workers, owners: Mapping[str, int]) -> list[float]:
        """Return the seconds per step of every rank. The cost of a factor without an owner
        is left out."""
        loads = [0.0] * self.world
        sent = [0.0] * self.world
        received = [0.0] * self.world
        to_all = 0.0
        for layer in self.layers:
            ranks = workers[layer.name]
            for rank in ranks:
                loads[rank] += self.precondition[layer.name]
            if self.held is None:
                sends = self.moved(layer, ranks[0], len(ranks))
                receives = sends / max(1, self.world // len(ranks) - 1)  # on average
                to_all += receives
                for rank in ranks:
                    sent[rank] += sends
                    received[rank] -= receives
            elif missing := self.moved(layer, ranks[0]):
                loads[ranks[0]] += missing
                for rank, elements in enumerate(self.held[layer.name]):
                    if rank != ranks[0]:
                        loads[rank] += self.costs.transfer(2 * ELEMENT_BYTES * elements)
        loads = [
            load + max(out, to_all + back)
            for load, out, back in zip(loads, sent, received, strict=True)
        ]
        for factor in self.factors:
            if factor.key in owners:
                self.decompose(loads, factor, owners[factor.key], self.users(factor, workers))
        return loads

    def decompose(self, loads: list[float], factor: FactorSpec, rank: int, users: set[int]) -> None:
        """Add the cost of a factor to ``loads``, in place. The decomposition costs time on the
        owner. The transfer of the eigenbasis costs time on the owner and on the other
        users."""
        loads[rank] += self.factor[factor.key]
        near = self.travel(factor, within_node=True)
        far = self.travel(factor)
        node = rank // self.costs.node_size
        sent = {
            user: near if user // self.costs.node_size == node else far for user in users - {rank}
        }
        for user, seconds in sent.items():
            loads[user] += seconds
        loads[rank] += sum(sent.values())

    def bytes_of(self, workers: Workers, owners: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """Return a dict from kind of memory to a list with the bytes on each rank.

        The kinds "factors" (on owners), "eigenbases" and "moments" (on gradient workers) are
        K-FAC's state. An eigenbasis that a rank uses for several layers is counted once. The kind
        "beside" is the memory that a step needs in addition: batch sums on owners, and
        gradients and results on gradient workers. Messages are not included.
        """
        nbytes = {kind: [0] * self.world for kind in ("factors", "eigenbases", "moments", "beside")}
        for layer in self.layers:
            for rank in workers[layer.name]:
                for kind, size in zip(
                    ("eigenbases", "moments", "beside"), self.worker_bytes(layer), strict=True
                ):
                    nbytes[kind][rank] += size
        for factor in self.factors:
            if factor.key in owners:
                for kind in ("factors", "beside"):
                    nbytes[kind][owners[factor.key]] += packed_bytes(factor.side)
            size = basis_bytes(factor.side, self.method)
            for rank in self.users(factor, workers):
                nbytes["eigenbases"][rank] += size
        return nbytes

    @staticmethod
    def users(factor: FactorSpec, workers: Workers) -> set[int]:
        """Return the ranks that precondition at least one of the layers that use the factor."""
        return {rank for layer in factor.layers for rank in workers[layer]}
