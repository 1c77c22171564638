"""What is timed, of refreshes: decompositions of one matrix and of many, an inverse by Cholesky, a
step of orthogonal iteration.

Shape suffixes: D a factor's side, n blocks of width b.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Op, Settings
from ds_kfac.curvature.iteration import FLOPS, orthogonal_iteration

SOLVERS = ("eigh", "eigh batched", "cholesky inverse", "iteration")
"""Not of the op vocabulary: the library's functions as refreshes use them."""
DIMS = (256, 512, 768, 1024, 1600, 2048, 3072, 4096, 6400, 11008)
DIM_FP64, DIM_BASELINES = 3072, 4096
"""Largest side in fp64, and the largest where other ways are timed, too: all take seconds above."""
CPU_DIM, CPU_STACK = 1024, 512
"""Largest sides on a CPU, where everything is about n^3 from there on."""
STACKS = (
    (64, 64),
    (48, 128),
    (32, 256),
    (16, 512),
    (12, 768),
    (8, 1024),
    (4, 1600),
    (4, 2048),
    (2, 3072),
    (2, 4096),
)
"""(n, b) of many equal blocks."""
ALLOWED = 1e-4
"""Relative error of fp32 decompositions of a few thousand rows."""
DAMPING = 1e-3


def eigh(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(blocks)


def eigh_in_float64(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Raises ValueError: too large to wait for."""
    if blocks.shape[-1] > DIM_FP64:
        raise ValueError(f"left out above {DIM_FP64}")
    values, vectors = torch.linalg.eigh(blocks.double())
    return values.float(), vectors.float()


def one_by_one(blocks: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [torch.linalg.eigh(block) for block in blocks]


def cholesky_inverse(block_DD: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(block_DD))


IMPLEMENTATIONS: Mapping[str, Mapping[str, Op]] = {
    "fp32": {
        "eigh": eigh,
        "eigh batched": eigh,
        "cholesky inverse": cholesky_inverse,
        "iteration": orthogonal_iteration,
    },
    "fp64": {"eigh": eigh_in_float64, "eigh batched": eigh_in_float64},
}
"""Name -> op -> function, as a backend's ops."""


def residual(C: Tensor, values: Tensor, vectors: Tensor) -> float:
    """Largest over blocks of |C - Q diag(values) Q^T| / |C| and |Q^T Q - 1| / sqrt(b), in
    float64."""
    worst = 0.0
    dim = C.shape[-1]
    blocks = (C.reshape(-1, dim, dim), values.reshape(-1, dim), vectors.reshape(-1, dim, dim))
    for block, value, Q in zip(*blocks, strict=True):
        block, value, Q = block.double(), value.double(), Q.double()
        of_C = (block - (Q * value) @ Q.T).norm() / block.norm()
        of_Q = (Q.T @ Q - torch.eye(len(Q), device=Q.device)).norm() / len(Q) ** 0.5
        worst = max(worst, float(torch.stack([of_C, of_Q]).max().nan_to_num(nan=float("inf"))))
    return worst


def second_moments(settings: Settings, count: int, dim: int) -> Tensor:
    """[n, b, b] of rows whose sizes fall over two decades."""
    x = settings.normal(count, 2 * dim, dim) * torch.logspace(0, -1, dim, device=settings.device)
    return x.mT @ x / (2 * dim)


def solvers(settings: Settings, wanted: set[str]) -> Iterator[Callable[[], Case]]:
    """What makes each case: tensors are made when it is reached and go with it."""
    limit = min(settings.max_dim, CPU_DIM) if settings.device == "cpu" else settings.max_dim
    stack_limit = min(limit, CPU_STACK) if settings.device == "cpu" else limit
    stacks = [shape for shape in STACKS if shape[1] <= stack_limit]
    makers: dict[str, list[Callable[[], Case]]] = {
        "eigh": [lambda dim=dim: exact(settings, "eigh", 1, dim) for dim in DIMS if dim <= limit],
        "eigh batched": [lambda s=s: exact(settings, "eigh batched", *s) for s in stacks],
        "cholesky inverse": [
            lambda dim=dim: inverse(settings, dim) for dim in DIMS if dim <= limit
        ],
        "iteration": [lambda s=s: step(settings, *s) for s in stacks],
    }
    for op, parts in makers.items():
        if op in wanted:
            yield from parts


def exact(settings: Settings, op: str, count: int, dim: int) -> Case:
    """Eigenvalues and vectors; many of them against a loop."""
    C = second_moments(settings, count, dim)

    def error(run: Op) -> tuple[float, float]:
        return residual(C, *run(C)), ALLOWED

    size = f"D {dim}" if op == "eigh" else f"{count} x {dim}"
    baselines: dict[str, Callable] = {} if op == "eigh" else {"one by one": lambda: one_by_one(C)}
    nbytes = C.nbytes * 2 + 4 * count * dim
    return Case(op, size, nbytes, 9 * count * dim**3, lambda run: run(C), error, baselines)


def inverse(settings: Settings, dim: int) -> Case:
    """Of a damped factor."""
    C_DD = second_moments(settings, 1, dim)[0]
    C_DD.diagonal().add_(DAMPING)

    def error(run: Op) -> tuple[float, float]:
        one = run(C_DD).double() @ C_DD.double()
        difference = (one - torch.eye(dim, device=one.device)).norm() / dim**0.5
        return float(difference.nan_to_num(nan=float("inf"))), 10 * ALLOWED

    return Case(
        "cholesky inverse",
        f"D {dim}",
        2 * C_DD.nbytes,
        dim**3,
        lambda run: run(C_DD),
        error,
        {"eigh": lambda: eigh(C_DD), "inv": lambda: torch.linalg.inv(C_DD)}
        if dim <= DIM_BASELINES
        else {},
    )


def step(settings: Settings, count: int, dim: int) -> Case:
    """Of orthogonal iteration, from the basis of factors that nine tenths of these are made of."""
    before, new = (second_moments(settings, count, dim) for _ in range(2))
    C, Q = 0.9 * before + 0.1 * new, torch.linalg.eigh(before)[1]

    def error(run: Op) -> tuple[float, float]:
        """How far from orthogonal the basis is."""
        _, vectors, usable = run(C, Q)
        one = torch.eye(dim, device=C.device, dtype=torch.float64)
        off = (vectors.double().mT @ vectors.double() - one).flatten(1).norm(dim=1).max() / dim**0.5
        return float(off.nan_to_num(nan=float("inf"))) if bool(usable.all()) else float(
            "inf"
        ), ALLOWED

    nbytes = 3 * C.nbytes + 4 * count * dim
    return Case(
        "iteration",
        f"{count} x {dim}",
        nbytes,
        round(FLOPS * count * dim**3),
        lambda run: run(C, Q),
        error,
        {"eigh": lambda: eigh(C)},
    )
