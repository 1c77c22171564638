"""What is timed, of KFACAdamW: Newton-Schulz iterations, by form, dtype and coefficients, and the
product's own.

Shape suffixes: n matrices [m, N], m the shorter side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Op, Settings
from benchmarks.single import newton_schulz
from ds_kfac.curvature.eigen import choose

SHAPES = (
    (1, 64, 64),
    (3, 64, 256),
    (1, 768, 768),
    (1, 768, 3072),
    (12, 768, 768),
    (12, 768, 3072),
    (12, 2304, 768),
    (48, 1600, 1600),
    (12, 1600, 6400),
    (1, 4096, 4096),
    (1, 4096, 11008),
)
CPU_DIM = 768
MUON = ((3.4445, -4.7750, 2.0315),) * 5
"""Jordan et al. 2024."""
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Amsel et al. 2025."""
SPREAD = 0.35
"""How far singular values may be from 1 after five steps, root mean square; Muon's coefficients
leave 0.68 to 1.2."""
CHECKED = 96
"""Shorter side of the matrix of known factors that a variant is checked with."""
Rows = Sequence[tuple[float, float, float]]


def normalized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Wide, of norm one."""
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    return (wide / torch.linalg.matrix_norm(wide, keepdim=True)).to(dtype)


def polynomial(gram: Tensor, row: tuple[float, float, float]) -> Tensor:
    """a + b G + c G^2, the a on the diagonal; the addend is the output, so nothing is copied."""
    a, b, c = row
    square = gram @ gram
    square.mul_(c).add_(gram, alpha=b).diagonal(dim1=-2, dim2=-1).add_(a)
    return square


def standard(x: Tensor, rows: Rows) -> Tensor:
    """Every step multiplies the matrix: 4 m^2 N + 2 m^3 FLOPs."""
    for row in rows:
        x = polynomial(x @ x.mT, row) @ x
    return x


def copying(x: Tensor, rows: Rows) -> Tensor:
    """The same by baddbmm, whose addends are copied."""
    for a, b, c in rows:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def gram(x: Tensor, rows: Rows) -> Tensor:
    """Steps on the Gram matrix, which multiply the matrix once: 8 m^3 a step."""
    r, q = x @ x.mT, None
    for row in rows:
        p = polynomial(r, row)
        q, r = (p if q is None else q @ p), r @ p @ p
    return q @ x


def restarted(x: Tensor, rows: Rows) -> Tensor:
    """:func:`gram`, begun again after two steps: what 16 bits need."""
    return gram(gram(x, rows[:2]), rows[2:])


FORMS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "standard": standard,
    "baddbmm": copying,
    "gram": gram,
    "gram(2)": restarted,
}
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
UNSAFE = {("gram", "fp16"), ("gram", "bf16"), ("gram(2)", "bf16")}
"""Singular values reach 580, or 1.4, where the matrix is nearly singular."""


def variant(form: str, dtype: str, rows: Rows) -> Op:
    def run(x: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            found = FORMS[form](normalized(x, DTYPES[dtype]), rows)
        finally:
            torch.set_float32_matmul_precision(before)
        return found.mT if x.shape[-2] > x.shape[-1] else found

    return run


def variants(device: str) -> Mapping[str, Op]:
    """Name -> function of [n, O, I]; on a CPU without those in 16 bits, which it has no units
    for."""
    names = [(form, dtype) for dtype in DTYPES for form in FORMS if (form, dtype) not in UNSAFE]
    if device == "cpu":
        names = [(form, dtype) for form, dtype in names if dtype == "fp32"]
    found = {f"{form} {dtype}": variant(form, dtype, MUON) for form, dtype in names}
    found["gram(2) polar express"] = variant(
        "gram(2)", "fp32" if device == "cpu" else "fp16", POLAR_EXPRESS
    )
    asked = ("highest",) if device == "cpu" else ("highest", "tf32")
    return {**{f"product {name}": product(name) for name in asked}, **found}


def product(asked: str) -> Op:
    """What KFACAdamW runs, with a value of ``preconditioner.precision``."""
    return lambda x: newton_schulz(x, precision=choose(asked, x.device))


def cases(settings: Settings) -> Iterator[Callable[[], Case]]:
    for shape in SHAPES:
        if max(shape) <= settings.max_dim and (settings.device != "cpu" or max(shape) <= CPU_DIM):
            yield lambda shape=shape: case(settings, *shape)


def case(settings: Settings, count: int, rows: int, columns: int) -> Case:
    x = settings.normal(count, rows, columns)
    m, n = sorted((rows, columns))

    short = min(m, CHECKED)
    sides = [short * side // m for side in (rows, columns)]
    U, V = (torch.linalg.qr(settings.normal(side, short))[0] for side in sides)
    known = (U * torch.logspace(0, -1, short, device=x.device)) @ V.mT

    def error(run: Op) -> tuple[float, float]:
        difference = (
            torch.linalg.matrix_norm(run(known[None])[0].double() - (U @ V.mT).double())
            / short**0.5
        )
        finite = torch.isfinite(run(x)).all()
        return float(
            torch.where(finite, difference, torch.inf).nan_to_num(nan=float("inf"))
        ), SPREAD

    return Case(
        "newton schulz",
        f"{count} x {rows} x {columns}",
        2 * x.nbytes,
        count * 5 * (4 * m * m * n + 2 * m**3),
        lambda run: run(x),
        error,
        {},
    )
