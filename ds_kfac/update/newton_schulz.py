"""The orthogonal factor of a direction: all its singular values set to about one, as Muon does.

Two forms of the same iteration, m the shorter and n the longer side. Below n = 1.75 m every step
multiplies the matrix; from there on only its Gram matrix [m, m] is iterated, and what it comes to
multiplies the matrix once, which is cheaper (gram-newton-schulz, Dao-AILab). There, what is rounded
is lost for the steps that follow: in 16 bits it begins again after :data:`RESTART` steps, and bf16
is too coarse at all. So it is fp16, which suits the standard form, too: a matrix of norm one needs
no large exponents, and fp16 rounds eight times finer than bf16 at the same speed.

It has the same size whatever is left of the direction. Where gradients die out Adam's direction
does too, and a layer must not walk on along what rounding and old moments make of it: below
:data:`FULL` the factor shrinks with it.

Shape suffixes: O, I the sides of a matrix; m, n its shorter and its longer side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Precision, fp32_products
from ds_kfac.ops.functional import SMALLEST

STEPS = ((3.4445, -4.7750, 2.0315),) * 5
"""Of the quintic x (a + b x^2 + c x^4), a row a step: Jordan et al. 2024, tuned to lift small
singular values fast, to 0.7 .. 1.2."""
GRAM_FROM = 1.75
"""n / m from which the Gram form is the cheaper one, by 7 % at least; they are even at 1.5. A fused
gate and up with a bias, [2 m, m + 1], is a little less than 2."""
RESTART = 2
FULL = 0.03
"""Root mean square of Adam's direction from which on a step has its full size. In ordinary training
it is 0.1 to 0.3 (Adam's steps are signal over noise), in 150 steps of gpt_small and mlm
(benchmarks/convergence) never below 0.032."""


def orthogonal_factors(
    directions: Sequence[Tensor],
    whitenings: Sequence[Tensor | None] | None = None,
    *,
    precision: Precision = HIGHEST,
) -> list[Tensor]:
    """Replace x = U S V^T by U V^T, nearly, of directions [n, O, I] that all have the same longer
    and the same shorter side: they are iterated together.

    Args:
        directions: fp32, overwritten: zero stays zero, and rows and columns of zeros stay so to the
            bit.
        whitenings: of each direction s, [2, n, I] as of ``Rotation.whitening``, or None. With s it
            becomes the factor of x diag(s), times diag(s); a column whose s is 0 is left out.
        precision: with TF32 the iteration is in fp16: it rounds as TF32 does, at twice the speed.

    Returns the Frobenius norms [n] that the directions had, without columns that are left out.
    """
    whitenings = whitenings or [None] * len(directions)
    dtype = torch.float16 if precision.products == "tf32" else directions[0].dtype
    wide = [x.mT if x.shape[-2] > x.shape[-1] else x for x in directions]  # the longer side last
    counts, sizes = [*map(len, wide)], []
    # the only copy
    x = torch.empty(sum(counts), *wide[0].shape[-2:], dtype=dtype, device=wide[0].device)
    for direction, rows, whitening, place in zip(
        directions, wide, whitenings, x.split(counts), strict=True
    ):
        # to norm one, in two passes over a direction with this one
        norm = torch.linalg.vector_norm(direction, dim=(-2, -1) if whitening is None else -2)
        if whitening is None:
            scale = norm.clamp(min=SMALLEST).reciprocal()[:, None, None]
        else:  # the norm of what is not left out, and of that scaled
            norm, scaled = torch.linalg.vector_norm(norm * whitening, dim=-1)
            scale = (whitening[1] / scaled.clamp(min=SMALLEST)[:, None])[:, None, :]
        sizes.append(norm)
        torch.mul(rows, scale.mT if rows is not direction else scale, out=place)
    del place  # the memory of what is iterated
    if len(x) == 1:
        x = x[0]  # a batch of one is slower as a batch
    m, n = x.shape[-2:]
    with fp32_products(precision.products, x.device):
        if n < GRAM_FROM * m:
            for row in STEPS:
                x = _polynomial(x @ x.mT, row) @ x
        else:
            half = dtype is torch.float16
            for steps in (STEPS[:RESTART], STEPS[RESTART:]) if half else (STEPS,):
                x = _gram_steps(x @ x.mT, steps) @ x
    for direction, rows, whitening, part in zip(
        directions, wide, whitenings, x.view(-1, m, n).split(counts), strict=True
    ):
        if whitening is None:
            rows.copy_(part)
        else:
            s = whitening[1, :, None]
            torch.mul(part, s.mT if rows is not direction else s, out=rows)
    return sizes


def flops(O: int, I: int, *, half: bool = False) -> int:  # noqa: E741
    """Of one matrix's products. A step is 4 m^2 n + 2 m^3 in the standard form, and at most 8 m^3
    in the Gram form."""
    (m, n), steps = sorted((O, I)), len(STEPS)
    if n < GRAM_FROM * m:
        return steps * (4 * m**2 * n + 2 * m**3)
    # of a step's products r^2, q p, r p and (r p) p a part's first step lacks the second, its last
    # the last two
    parts = 2 if half else 1
    return parts * 4 * m**2 * n + (4 * steps - 3 * parts) * 2 * m**3


def workspace(O: int, I: int) -> int:  # noqa: E741
    """Elements of one matrix's copies and products, at most."""
    m, n = sorted((O, I))
    gram = 4 * m**2 + m * n if n >= GRAM_FROM * m else 0
    return max(2 * m * n + m**2, gram)


def _gram_steps(r_mm: Tensor, rows: Sequence[tuple[float, float, float]]) -> Tensor:
    """The product Q of the steps' polynomials p of the Gram matrix r, which is overwritten. r, Q
    and p commute. Four matrices at a time."""
    q_mm = p_mm = _polynomial(r_mm, rows[0])
    for row in rows[1:]:
        spare_mm = r_mm @ p_mm
        torch.matmul(spare_mm, p_mm, out=r_mm)
        p_mm = _polynomial(r_mm, row, out=spare_mm)
        q_mm = q_mm @ p_mm
    return q_mm


def _polynomial(r_mm: Tensor, row: tuple[float, float, float], out: Tensor | None = None) -> Tensor:
    """a I + b r + c r^2. a goes on the diagonal: as the product's addend, a matrix would be copied
    first."""
    a, b, c = row
    plus = torch.addmm if r_mm.ndim == 2 else torch.baddbmm
    p_mm = plus(r_mm, r_mm, r_mm, beta=b, alpha=c, out=out)
    p_mm.diagonal(dim1=-2, dim2=-1).add_(a)
    return p_mm
