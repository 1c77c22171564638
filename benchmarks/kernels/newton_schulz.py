"""Cases of Newton-Schulz: what KFACAdamW runs, beside the five plain steps that Muon publishes.

Shape suffixes: n matrices [O, I] of a layer each; m is the shorter side.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Op, Settings
from benchmarks.single import newton_schulz
from ds_kfac.curvature.eigen import choose

NEWTON_SCHULZ = "newton schulz"
SHAPES = (
    (1, 768, 768),
    (1, 768, 3072),
    (12, 768, 768),
    (12, 768, 3072),
    (12, 2304, 768),
    (12, 1600, 6400),
    (1, 4096, 4096),
    (1, 4096, 11008),
)
CPU_DIM = 768
MUON = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. 2024."""
STEPS = 5
SPREAD = 0.35
"""Root mean square of 1 - singular value: Muon's coefficients leave 0.68 to 1.2."""
CHECKED = 96
"""Shorter side of the matrix of known factors that an implementation is checked with."""


def published(x_nOI: Tensor, dtype: torch.dtype) -> Tensor:
    """Five steps as Muon publishes them, in ``dtype``."""
    a, b, c = MUON
    x = x_nOI.mT if x_nOI.shape[-2] > x_nOI.shape[-1] else x_nOI
    x = (x / torch.linalg.matrix_norm(x, keepdim=True)).to(dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if x_nOI.shape[-2] > x_nOI.shape[-1] else x


def implementations(device: str) -> dict[str, Mapping[str, Op]]:
    """Name -> op -> function: one for each ``preconditioner.precision`` that differs there."""
    asked = ("highest",) if device == "cpu" else ("highest", "tf32")

    def product(precision: str) -> Op:
        return lambda x: newton_schulz(x, precision=choose(precision, x.device))

    return {precision: {NEWTON_SCHULZ: product(precision)} for precision in asked}


def cases(settings: Settings) -> Iterator[Callable[[], Case]]:
    for shape in SHAPES:
        fits_cpu = settings.device != "cpu" or max(shape) <= CPU_DIM
        if max(shape) <= settings.max_dim and fits_cpu:
            yield lambda shape=shape: case(settings, *shape)


def case(settings: Settings, count: int, rows: int, columns: int) -> Case:
    x_nOI = settings.normal(count, rows, columns)
    m, n = sorted((rows, columns))
    short = min(m, CHECKED)
    sides = [short * side // m for side in (rows, columns)]
    U, V = (torch.linalg.qr(settings.normal(side, short))[0] for side in sides)
    known = (U * torch.logspace(0, -1, short, device=x_nOI.device)) @ V.mT

    def error(run: Op) -> tuple[float, float]:
        found = run(known[None])[0].double()
        difference = torch.linalg.matrix_norm(found - (U @ V.mT).double()) / short**0.5
        finite = torch.isfinite(run(x_nOI)).all()
        off = torch.where(finite, difference, torch.inf)
        return float(off.nan_to_num(nan=float("inf"))), SPREAD

    baselines = {"published, fp32": lambda: published(x_nOI, torch.float32)}
    if x_nOI.is_cuda:
        baselines["published, bf16"] = lambda: published(x_nOI, torch.bfloat16)
    flops = count * STEPS * (4 * m * m * n + 2 * m**3)
    size = f"{count} x {rows} x {columns}"
    return Case(
        NEWTON_SCHULZ, size, 2 * x_nOI.nbytes, flops, lambda run: run(x_nOI), error, baselines
    )
