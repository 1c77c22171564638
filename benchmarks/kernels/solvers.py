"""Cases of refreshes: decompositions, an inverse by Cholesky, and a step of orthogonal iteration.

Shape suffixes: D a factor's side; n factors of side b.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Op, Settings
from ds_kfac.curvature.iteration import FLOPS, orthogonal_iteration

SOLVERS = ("eigh", "cholesky inverse", "iteration")
DIMS = (256, 512, 768, 1024, 1600, 2048, 3072, 4096, 6400, 11008)
LARGEST_BASELINE = 4096
"""Largest side at which the other ways are timed, too: all take seconds above."""
CPU_DIM, CPU_STACK = 1024, 512
"""Largest sides on a CPU, where the time grows as n^3 from there on."""
STACKS = ((48, 128), (32, 256), (16, 512), (12, 768), (8, 1024), (4, 2048), (2, 3072), (2, 4096))
"""(n, b) of factors that are iterated together."""
ALLOWED = 1e-4
"""Relative error of fp32 decompositions of a few thousand rows."""
DAMPING = 1e-3


def eigh(C: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(C)


def cholesky_inverse(C_DD: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(C_DD))


IMPLEMENTATIONS: Mapping[str, Mapping[str, Op]] = {
    "fp32": {"eigh": eigh, "cholesky inverse": cholesky_inverse, "iteration": orthogonal_iteration}
}
"""Name -> op -> function, as a backend's ops."""


def second_moments(settings: Settings, count: int, dim: int) -> Tensor:
    """Return [n, b, b] of rows whose sizes fall over two decades."""
    x = settings.normal(count, 2 * dim, dim) * torch.logspace(0, -1, dim, device=settings.device)
    return x.mT @ x / (2 * dim)


def solvers(settings: Settings, wanted: set[str]) -> Iterator[Callable[[], Case]]:
    """Yield functions that make the cases: tensors are made when a case is reached."""
    on_cpu = settings.device == "cpu"
    limit = min(settings.max_dim, CPU_DIM) if on_cpu else settings.max_dim
    stack_limit = min(limit, CPU_STACK) if on_cpu else limit
    for dim in DIMS:
        if dim <= limit and "eigh" in wanted:
            yield lambda dim=dim: decomposition(settings, dim)
        if dim <= limit and "cholesky inverse" in wanted:
            yield lambda dim=dim: inverse(settings, dim)
    for count, dim in STACKS:
        if dim <= stack_limit and "iteration" in wanted:
            yield lambda count=count, dim=dim: iteration(settings, count, dim)


def decomposition(settings: Settings, dim: int) -> Case:
    C_DD = second_moments(settings, 1, dim)[0]

    def error(run: Op) -> tuple[float, float]:
        """Measure |C - Q diag(values) Q^T| / |C| and |Q^T Q - 1| / sqrt(D), in float64."""
        values, Q = (part.double() for part in run(C_DD))
        of_C = ((Q * values) @ Q.T - C_DD.double()).norm() / C_DD.double().norm()
        return max(finite(of_C), off_orthogonal(Q[None])), ALLOWED

    nbytes = 2 * C_DD.nbytes + 4 * dim
    return Case("eigh", f"D {dim}", nbytes, 9 * dim**3, lambda run: run(C_DD), error, {})


def inverse(settings: Settings, dim: int) -> Case:
    C_DD = second_moments(settings, 1, dim)[0]
    C_DD.diagonal().add_(DAMPING)

    def error(run: Op) -> tuple[float, float]:
        one = run(C_DD).double() @ C_DD.double()
        return finite((one - torch.eye(dim, device=one.device)).norm() / dim**0.5), 10 * ALLOWED

    baselines: dict[str, Callable] = {}
    if dim <= LARGEST_BASELINE:
        baselines = {"eigh": lambda: eigh(C_DD), "inv": lambda: torch.linalg.inv(C_DD)}
    size = f"D {dim}"
    return Case(
        "cholesky inverse", size, 2 * C_DD.nbytes, dim**3, lambda run: run(C_DD), error, baselines
    )


def iteration(settings: Settings, count: int, dim: int) -> Case:
    """A step from the basis of factors that nine tenths of these are made of."""
    before, new = (second_moments(settings, count, dim) for _ in range(2))
    C, Q = 0.9 * before + 0.1 * new, torch.linalg.eigh(before)[1]

    def error(run: Op) -> tuple[float, float]:
        _, vectors, usable = run(C, Q)
        return off_orthogonal(vectors) if bool(usable.all()) else float("inf"), ALLOWED

    flops, nbytes = round(FLOPS * count * dim**3), 3 * C.nbytes + 4 * count * dim
    baselines = {"eigh": lambda: eigh(C)}
    size = f"{count} x {dim}"
    return Case("iteration", size, nbytes, flops, lambda run: run(C, Q), error, baselines)


def off_orthogonal(Q: Tensor) -> float:
    """Return the largest |Q^T Q - 1| / sqrt(b) of [n, b, b]."""
    one = torch.eye(Q.shape[-1], device=Q.device, dtype=torch.float64)
    return finite((Q.double().mT @ Q.double() - one).flatten(1).norm(dim=1).max() / len(one) ** 0.5)


def finite(x: Tensor) -> float:
    """Return the number, infinite if it is not a number."""
    return float(x.nan_to_num(nan=float("inf")))
