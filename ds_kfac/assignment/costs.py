"""The tasks of a step and their costs. A device's rates give the seconds of each kind of work;
factors are listed apart from layers, as layers with one input share an A; and each task has seconds
per step and bytes on the rank that does it. Pure: every rank makes the same plan from the same
numbers.
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
"""All state is fp32, and all messages are taken to be."""
FOLD_CALLS, FOLD_PASSES = 10, 6
"""Kernels, and passes over memory, to average one batch sum into a copy of a factor."""
Workers = Mapping[str, tuple[int, ...]]
"""Layer name -> ranks that precondition its gradient, ascending."""
Table = tuple[tuple[int, float], ...]
"""(size, value), sizes ascending."""


def capture_flops(side: Side, rows: int) -> int:
    """FLOPs of x^T x, symmetric, inside the side's blocks."""
    return sum(rows * count * width * (width + 1) for count, width in side.groups)


def decompose_flops(side: Side, method: Method = EIGEN) -> int:
    """9 n^3 for eigh by tridiagonalisation (Golub & Van Loan, 8.3), n^3 for a Cholesky inverse, 0
    for a diagonal."""
    return (
        sum(method.solver_flops * count * width**3 for count, width in side.groups)
        if side.block > 1
        else 0
    )


def precondition_flops(layer: LayerSpec, method: Method = EIGEN) -> int:
    """FLOPs to rotate a gradient and rotate it back: 4 O I (O + I) for dense sides; half of it with
    inverses."""
    numel = layer.G.dim * layer.A.basis_numel + layer.A.dim * layer.G.basis_numel
    return method.product_flops * numel // layer.groups


@dataclass(frozen=True)
class CostModel:
    """Rates of a device and of the links between ranks; methods return seconds.

    Attributes:
        eigh_seconds, cholesky_seconds: (n, seconds) of one n x n fp32 eigh, or inverse by Cholesky,
            n ascending. Between two sizes a power of n; below the first its seconds, the floor of a
            call; above the last n^3.
        gemm_flops: fp32 FLOP/s of a large matrix product.
        product_flops: (n, FLOP/s of products of n x n matrices); empty: ``gemm_flops`` at all
            sizes.
        syrk_flops: FLOP/s of x^T x, counted as rows D (D + 1).
        copy_bytes: bytes per second that elementwise work reads and writes.
        call_seconds: seconds to start a kernel.
        link_bytes: bytes per second between ranks, each way; between nodes, if ``node_bytes`` is
            given.
        link_seconds: latency of a message.
        node_size: number of consecutive ranks on a node.
        node_bytes: bytes per second between ranks of a node, each way; 0: as between nodes.
        model_flops: FLOP/s of the model's forward and backward, and of products in 16 bits; 0:
            ``gemm_flops``.
        node_cores: decompositions that a node's ranks can run at once; 0: each rank has a device of
            its own.
        ieee_flops: FLOP/s of large fp32 (not TF32) products, for steps from a last eigenbasis; 0:
            eigh is as fast.
        gpu: whether these are rates of a GPU.
        measured: attributes that were measured on such a device; others are assumed.
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
        """FLOP/s of a product of n x n matrices: between two sizes a power of n, beyond them the
        nearest."""
        if not self.product_flops:
            return self.gemm_flops
        sizes = [size for size, _ in self.product_flops]
        return _interpolated(self.product_flops, min(max(width, sizes[0]), sizes[-1]))

    def step(self, width: int, method: Method = ITERATED) -> float:
        """Seconds of one step from a last eigenbasis: products, solves, two Cholesky factors (2/3
        of an inverse)."""
        products = (method.step_flops - 2 / 3) * width**3 / min(self.ieee_flops, self.rate(width))
        return products + 2 / 3 * _interpolated(self.cholesky_seconds, width)

    def elementwise(self, nbytes: float, calls: int = 1) -> float:
        return nbytes / self.copy_bytes + calls * self.call_seconds

    def transfer(self, nbytes: float, *, within_node: bool = False) -> float:
        """Seconds to send bytes between two ranks, without latency: many layers share a message."""
        return nbytes / (self.node_bytes if within_node and self.node_bytes else self.link_bytes)

    def decompose(self, side: Side, method: Method = EIGEN) -> float:
        """Mean seconds of a factor's refreshes after the burn-in; a diagonal is its own
        eigenbasis."""
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
        """Seconds to rotate, divide and rotate back, or to multiply by both inverses."""
        seconds = precondition_flops(layer, method) / self.rate(mean_width(layer))
        return seconds + self.elementwise(method.passes * ELEMENT_BYTES * layer.numel, method.calls)

    def fold(self, side: Side) -> float:
        """Seconds to average one batch sum into a factor."""
        return self.elementwise(FOLD_PASSES * ELEMENT_BYTES * side.numel, FOLD_CALLS)


def mean_width(layer: LayerSpec) -> float:
    """Width of a square matrix with as many elements as one of the layer's groups."""
    return (layer.numel / layer.groups) ** 0.5


def _interpolated(table: Table, n: float) -> float:
    """Seconds at n, see :class:`CostModel`."""
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


# measured: one thread of a Xeon (Cascade Lake) at 2.5 GHz, torch 2.13, medians; not so the link, 10
# Gbit/s
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
# measured: an H100 80GB HBM3, torch 2.11, TF32 products, by benchmarks/kernels/costs.py, and a
# GPT-2-small step by benchmarks/step.py; not so the links, 200 Gbit/s between nodes and 1600
# within
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
"""By device type."""


TABLES = ("eigh_seconds", "cholesky_seconds", "product_flops")
RATES = (
    "gemm_flops ieee_flops syrk_flops copy_bytes call_seconds link_bytes link_seconds node_bytes"
).split()


def measured(costs: CostModel, path: str) -> CostModel:
    """``costs`` with values from a file that ``python -m benchmarks.kernels.costs`` wrote: a JSON
    object of fields of :class:`CostModel`, tables as lists of [size, value]. "machine" is for
    people; missing fields stay builtin.

    Raises:
        ValueError: no such file, or it holds something else.
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
                raise ValueError(f"{name}: sizes must ascend")
    except (OSError, ValueError, TypeError) as problem:
        raise ValueError(
            f"--costs {path}: {problem}; python -m benchmarks.kernels.costs writes one"
        ) from None
    return replace(costs, **fields, measured=frozenset(fields))


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)


@dataclass(frozen=True)
class FactorSpec:
    """A factor that some rank averages and decomposes; identity sides have none. ``layers``: names
    of the layers that have it, several if they share their input. ``key``: "<layer>/A" or
    "<layer>/G", by the first of them."""

    key: str
    side: Side
    layers: tuple[str, ...]

    @property
    def is_A(self) -> bool:
        return self.key.endswith("/A")


def factor_specs(
    layers: Sequence[LayerSpec], shared: Sequence[Sequence[str]] = ()
) -> tuple[FactorSpec, ...]:
    """All factors, in module order, A before G. A layer has the A of the one that it names in
    ``shares``; the layers of a group in ``shared``, which see one input, have the A of the first of
    them."""
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
            assert first_side == side, f"{key} and {layer.name} share an input of another kind"
            users.setdefault(key, []).append(layer.name)
    return tuple(FactorSpec(key, sides[key], tuple(users[key])) for key in users)


def factors_by_layer(factors: Sequence[FactorSpec]) -> Mapping[str, Mapping[str, FactorSpec]]:
    """Layer name -> {"A": .., "G": ..}, without identity sides."""
    by_layer: dict[str, dict[str, FactorSpec]] = {}
    for factor in factors:
        for layer in factor.layers:
            by_layer.setdefault(layer, {})["A" if factor.is_A else "G"] = factor
    return by_layer


def packed_bytes(side: Side) -> int:
    """Bytes of a running factor: fp32 packed triangles and a counter."""
    return 4 * side.numel + 4


def basis_bytes(side: Side, method: Method) -> int:
    """Bytes of a factor's decomposition, in fp32."""
    return 4 * method.numel(side)


@dataclass(frozen=True)
class Work:
    """Cost of every task that can be assigned to a rank, in seconds per step, amortised over the
    intervals.

    Sender and receiver both pay for a message, the sender for every copy; results leave and arrive
    at the same time, so the longer direction counts. Work that all ranks do alike, capturing and
    sending batch sums, is left out.

    Attributes:
        held: layer name -> gradient elements on each rank; None if all ranks hold all gradients.
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
        """Factors of each layer; none for a layer of identity sides."""
        by_layer = factors_by_layer(self.factors)
        return {layer.name: tuple(by_layer.get(layer.name, {}).values()) for layer in self.layers}

    @cached_property
    def precondition(self) -> Mapping[str, float]:
        """Seconds per step on each worker of a layer."""
        return {layer.name: self.costs.precondition(layer, self.method) for layer in self.layers}

    @cached_property
    def factor(self) -> Mapping[str, float]:
        """Seconds per step on the eigen worker: receive and fold batch sums, decompose."""
        return {
            factor.key: (
                self.costs.transfer(packed_bytes(factor.side)) + self.costs.fold(factor.side)
            )
            / self.update_interval
            + self.costs.decompose(factor.side, self.method) / self.refresh_interval
            for factor in self.factors
        }

    def travel(self, factor: FactorSpec, *, within_node: bool = False) -> float:
        """Seconds per step for either end of sending one copy of an eigenbasis."""
        nbytes = ELEMENT_BYTES * self.method.wire_numel(factor.side)
        return self.costs.transfer(nbytes, within_node=within_node) / self.refresh_interval

    def moved(self, layer: LayerSpec, rank: int, workers: int = 1) -> float:
        """Seconds per step that a layer's worker spends on moving: it gathers the gradient's parts
        and returns the result; if gradients are replicated, it sends the result along a row of
        consecutive ranks."""
        if self.held is not None:
            missing = max(0, layer.numel - self.held[layer.name][rank])
            return self.costs.transfer(2 * ELEMENT_BYTES * missing)
        nbytes, width = ELEMENT_BYTES * layer.numel, self.world // workers
        within = min(width, self.costs.node_size) - 1
        sends = within * self.costs.transfer(nbytes, within_node=True)
        return sends + (width - 1 - within) * self.costs.transfer(nbytes)

    def worker_bytes(self, layer: LayerSpec) -> tuple[int, int, int]:
        """(bytes of identities' eigenvalues; of moments and their counter; of gradient and result
        in a step) of a layer on each worker."""
        ones = sum(basis_bytes(side, self.method) for side in (layer.A, layer.G) if side.block == 0)
        return (
            ones,
            4 * self.moments * layer.numel + 4 if self.moments else 0,
            2 * ELEMENT_BYTES * layer.numel,
        )

    def loads(self, workers: Workers, eigen_workers: Mapping[str, int]) -> list[float]:
        """Seconds per step of every rank; factors without an eigen worker are left out."""
        loads, sent, received, to_all = (
            [0.0] * self.world,
            [0.0] * self.world,
            [0.0] * self.world,
            0.0,
        )
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
            if factor.key in eigen_workers:
                self.decompose(
                    loads, factor, eigen_workers[factor.key], self.users(factor, workers)
                )
        return loads

    def decompose(self, loads: list[float], factor: FactorSpec, rank: int, users: set[int]) -> None:
        """Add a factor's seconds to its eigen worker, and its eigenbasis's travel to sender and
        receivers."""
        loads[rank] += self.factor[factor.key]
        near, far = self.travel(factor, within_node=True), self.travel(factor)
        node = rank // self.costs.node_size
        sent = {
            user: near if user // self.costs.node_size == node else far for user in users - {rank}
        }
        for user, seconds in sent.items():
            loads[user] += seconds
        loads[rank] += sum(sent.values())

    def bytes_of(
        self, workers: Workers, eigen_workers: Mapping[str, int]
    ) -> Mapping[str, Sequence[int]]:
        """Kind -> bytes on every rank. State: factors on eigen workers; eigenbases, each once, and
        moments on workers. "beside" it what a step needs, without messages: batch sums on eigen
        workers, gradients and results."""
        nbytes = {kind: [0] * self.world for kind in ("factors", "eigenbases", "moments", "beside")}
        for layer in self.layers:
            for rank in workers[layer.name]:
                for kind, size in zip(
                    ("eigenbases", "moments", "beside"), self.worker_bytes(layer), strict=True
                ):
                    nbytes[kind][rank] += size
        for factor in self.factors:
            if factor.key in eigen_workers:
                for kind in ("factors", "beside"):
                    nbytes[kind][eigen_workers[factor.key]] += packed_bytes(factor.side)
            size = basis_bytes(factor.side, self.method)
            for rank in self.users(factor, workers):
                nbytes["eigenbases"][rank] += size
        return nbytes

    @staticmethod
    def users(factor: FactorSpec, workers: Workers) -> set[int]:
        """Ranks that precondition with a factor."""
        return {rank for layer in factor.layers for rank in workers[layer]}
