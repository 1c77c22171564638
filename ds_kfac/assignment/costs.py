"""Seconds of K-FAC's kinds of work on one device, by builtin rates or those of a file. Pure; the same numbers on every
rank give the same plans.

The file is written by ``python -m benchmarks.kernels.costs``: JSON, an object of fields of :class:`CostModel`, tables
as lists of [size, value]; "machine" is for people. What it lacks stays builtin, and the estimator says that it is
assumed.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.methods import EIGEN, Method
from ds_kfac.model.layers import LayerSpec

ELEMENT_BYTES = 4
"""All state and, in the model, everything that is sent is fp32."""
FOLD_CALLS, FOLD_PASSES = 10, 6
"""Kernels started, and passes over it, to fold one batch sum into a copy of a running average."""


Table = tuple[tuple[int, float], ...]
"""(size, value), sizes ascending."""


def capture_flops(side: Side, rows: int) -> int:
    """Of rows^T rows, symmetric, inside the side's blocks."""
    return sum(rows * count * width * (width + 1) for count, width in side.groups)


def decompose_flops(side: Side, method: Method = EIGEN) -> int:
    """9 n^3 for all eigenvalues and vectors by tridiagonalisation (Golub & Van Loan, 8.3), n^3 for an inverse by
    Cholesky; a diagonal needs none."""
    return sum(method.solver_flops * count * width**3 for count, width in side.groups) if side.block > 1 else 0


def precondition_flops(layer: LayerSpec, method: Method = EIGEN) -> int:
    """Rotate and rotate back: 4 O I (O + I) for dense sides, less for blocks, none for diagonals; inverses half."""
    numel = layer.dim_G * layer.A.basis_numel + layer.dim_A * layer.G.basis_numel
    return method.product_flops * numel // layer.groups


@dataclass(frozen=True)
class CostModel:
    """Rates of a device and of the links between ranks; methods return seconds.

    Attributes:
        eigh_seconds: (n, seconds) of one n x n fp32 eigh, n ascending. Between two sizes a power of n; below the
            first its seconds, as the floor of a call; above the last n^3.
        cholesky_seconds: the same of one inverse by Cholesky.
        gemm_flops: fp32 FLOP per second of a large matrix product.
        product_flops: (n, the same of n x n matrices); empty: of any size.
        syrk_flops: the same of rows^T rows, counting rows D (D + 1).
        copy_bytes: bytes read and written per second by elementwise work.
        call_seconds: floor of starting any kernel.
        link_bytes: bytes per second between ranks, each way; of different nodes, if ``node_bytes`` is given.
        link_seconds: latency of a message.
        node_size: consecutive ranks of a node.
        node_bytes: bytes per second between ranks of a node, each way; 0: as between nodes.
        model_flops: FLOP per second that the model's forward and backward reach, and products in 16 bits; 0: those of a
            product.
        node_cores: decompositions that the ranks of a node can do at once; 0: each has a device of its own.
        beside: whether decompositions of steps to come run beside the model, in a stream of the device.
        measured: attributes that a clock has seen on such a device; others are assumed.
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
    beside: bool = False
    product_flops: Table = ()
    measured: frozenset[str] = frozenset()

    def eigh(self, n: int, count: int = 1) -> float:
        """``count`` decompositions one after the other, as LAPACK does a batch."""
        return count * _interpolated(self.eigh_seconds, n)

    def gemm(self, flops: float, width: float = math.inf) -> float:
        """Products of matrices that are about so wide."""
        return flops / self.rate(width)

    def rate(self, width: float) -> float:
        """FLOP per second of a product of n x n matrices: between two sizes a power of n, beyond them the last."""
        if not self.product_flops:
            return self.gemm_flops
        sizes = [size for size, _ in self.product_flops]
        return _interpolated(self.product_flops, min(max(width, sizes[0]), sizes[-1]))

    def elementwise(self, nbytes: float, calls: int = 1) -> float:
        return nbytes / self.copy_bytes + calls * self.call_seconds

    def transfer(self, nbytes: float, messages: int = 0, *, within_node: bool = False) -> float:
        """Between two ranks. Messages of many layers travel in one, so most callers count bytes only."""
        rate = self.node_bytes if within_node and self.node_bytes else self.link_bytes
        return nbytes / rate + messages * self.link_seconds

    def decompose(self, side: Side, method: Method = EIGEN) -> float:
        """One refresh of a factor; a diagonal is its own eigenbasis."""
        if side.block <= 1:
            return sum(self.elementwise(2 * ELEMENT_BYTES * count) for count, _ in side.groups)
        return sum(count * self._solved(method, width) for count, width in side.groups)

    def _solved(self, method: Method, width: int) -> float:
        seconds = _interpolated(getattr(self, method.solver_seconds), width)
        flops = method.product_solver_flops  # of b^3, 2 a product
        products = self.gemm(flops * width**3, width) + flops / 2 * self.call_seconds
        return min(seconds, products) if flops else seconds

    def precondition(self, layer: LayerSpec, method: Method = EIGEN) -> float:
        """Rotate, divide, rotate back; or multiply by both inverses."""
        elementwise = self.elementwise(method.passes * ELEMENT_BYTES * layer.numel, method.calls)
        return self.gemm(precondition_flops(layer, method), mean_width(layer)) + elementwise

    def fold(self, side: Side) -> float:
        """One batch sum into the running average."""
        return self.elementwise(FOLD_PASSES * ELEMENT_BYTES * side.numel, FOLD_CALLS)

    def capture(self, side: Side, rows: int) -> float:
        """Second moment of ``rows`` rows, on every rank alike."""
        return capture_flops(side, rows) / self.syrk_flops


def mean_width(layer: LayerSpec) -> float:
    """Side of a square matrix with as many elements as one of the layer's groups."""
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


BUILTIN: Mapping[str, CostModel] = {
    # Measured: one thread of a Xeon (Cascade Lake) at 2.5 GHz, torch 2.13, medians; not so the link, 10 Gbit/s.
    "cpu": CostModel(
        eigh_seconds=((16, 41e-6), (64, 0.42e-3), (256, 6.0e-3), (512, 25e-3), (1024, 0.15), (2048, 0.99)),
        gemm_flops=1.2e11,
        syrk_flops=4.8e10,
        copy_bytes=1.1e10,
        call_seconds=8e-6,
        link_bytes=1.25e9,
        link_seconds=50e-6,
        cholesky_seconds=((16, 71e-6), (64, 0.21e-3), (256, 1.5e-3), (512, 6.7e-3), (1024, 43e-3), (2048, 0.26)),
    ),
    # Not measured: orders of magnitude from published figures of an A100 (TF32 products, cuSOLVER's syevd), 200 Gbit/s
    # between nodes and 1600 within.
    "cuda": CostModel(
        eigh_seconds=((64, 1e-3), (256, 4e-3), (512, 10e-3), (1024, 27e-3), (2048, 80e-3), (4096, 0.3), (8192, 1.5)),
        gemm_flops=1e14,
        syrk_flops=1.2e14,
        copy_bytes=1.4e12,
        call_seconds=6e-6,
        link_bytes=2.5e10,
        link_seconds=20e-6,
        node_bytes=2e11,
        beside=True,
        cholesky_seconds=((64, 2e-4), (512, 1.2e-3), (1024, 3e-3), (2048, 8e-3), (4096, 0.03), (8192, 0.15)),
    ),
}
"""By device type."""


TABLES = ("eigh_seconds", "cholesky_seconds", "product_flops")
RATES = ("gemm_flops", "syrk_flops", "copy_bytes", "call_seconds", "qr_of_eigh")
NUMBERS = (*RATES, "link_bytes", "link_seconds", "node_bytes")


def measured(costs: CostModel, path: str) -> CostModel:
    """``costs`` with what the file has.

    Raises:
        ValueError: no such file, or it holds something else.
    """
    try:
        found = json.loads(Path(path).read_text())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        found.pop("machine", None)
        unknown = found.keys() - {*TABLES, *NUMBERS}
        if unknown:
            raise ValueError(f"{min(unknown)} is none of {', '.join((*TABLES, *NUMBERS))}")
        fields: dict[str, Any] = {name: _positive(found[name]) for name in NUMBERS if name in found}
        fields |= {name: _table(name, found[name]) for name in TABLES if name in found}
    except (OSError, ValueError, TypeError) as problem:
        raise ValueError(
            f"kfac.assignment.costs: {path}: {problem}; python -m benchmarks.kernels.costs writes one"
        ) from None
    return replace(costs, **fields, measured=frozenset(fields))


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)


def _table(name: str, rows: Any) -> Table:
    table = tuple((int(_positive(size)), _positive(value)) for size, value in rows)
    if not table or [size for size, _ in table] != sorted({size for size, _ in table}):
        raise ValueError(f"{name}: sizes must ascend")
    return table
