"""The orthogonal factor of a direction: all its singular values set to about one, as Muon does.

Two forms of the same iteration, m the shorter and n the longer side. Below n = 1.75 m every step multiplies the matrix;
from there on only its Gram matrix [m, m] is iterated, and what it comes to multiplies the matrix once, which is cheaper
(gram-newton-schulz, Dao-AILab). There, what is rounded is lost for the steps that follow: in 16 bits it begins again
after :data:`RESTART` steps, and bf16 is too coarse at all. So it is fp16, which suits the standard form, too: a matrix
of norm one needs no large exponents, and fp16 rounds eight times finer than bf16 at the same speed.

It has the same size whatever is left of the direction. Where gradients die out Adam's direction does too, and a layer
must not walk on along what rounding and old moments make of it: below :data:`FULL` the factor shrinks with it.

Shape suffixes: O, I the sides of a layer's matrix; a leading n for matrices of one shape at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Precision, fp32_products

STEPS = ((3.4445, -4.7750, 2.0315),) * 5
"""Of the quintic x (a + b x^2 + c x^4), a row a step: Jordan et al. 2024, tuned to lift small singular values fast, to
0.7 .. 1.2."""
GRAM_FROM = 1.75
"""n / m from which the Gram form is the cheaper one, by 7 % at least; they are even at 1.5. A fused gate and up with a
bias, [2 m, m + 1], is a little less than 2."""
RESTART = 2
FULL = 0.03
"""Root mean square of Adam's direction from which on a step has its full size. In ordinary training it is 0.1 to 0.3
(Adam's steps are signal over noise), in 150 steps of gpt_small and mlm (benchmarks/convergence) never below 0.032."""
SMALLEST = 1e-15
"""A norm below which a matrix is scaled as if it had this one: its squares would be lost, and a quotient blow up."""


def orthogonal_factors(
    directions: Sequence[Tensor],
    columns: Sequence[Tensor | None] | None = None,
    *,
    precision: Precision = HIGHEST,
) -> list[tuple[Tensor, Tensor]]:
    """U V^T of x = U S V^T, nearly, of directions [O, I] or [n, O, I], all with the same longer and shorter side: they
    are iterated together.

    Args:
        columns: s [.., I] of each direction, or None: then it is the factor of x diag(s), times diag(s). A column
            whose s is 0 is left out.
        precision: with TF32 the iteration is in fp16: it rounds as TF32 does, at twice the speed.

    Returns the factors, zero of zero, in the place of the directions, and the Frobenius norms that those had without
    what is left out, scalars or [n]. Rows and columns of zeros stay so to the bit.
    """
    scales = [None] * len(directions) if columns is None else columns
    dtype = torch.float16 if precision.products == "tf32" else directions[0].dtype
    counts, alone = [len(x) if x.ndim > 2 else 1 for x in directions], len(directions) == 1
    wide = [x.mT if x.shape[-2] > x.shape[-1] else x for x in directions]
    # [m, n] of one, of several [.., m, n]; the only copy
    shape = wide[0].shape if alone else (sum(counts), *wide[0].shape[-2:])
    together, sizes = torch.empty(shape, dtype=dtype, device=wide[0].device), []
    for x, own, s, place in zip(directions, wide, scales, [together] if alone else together.split(counts), strict=True):
        # to norm one, in two passes over x with this one
        lengths = torch.linalg.vector_norm(x, dim=(-2, -1) if s is None else -2)
        if s is None:
            sizes.append(lengths)
            scale = lengths.clamp(min=SMALLEST).reciprocal()[..., None, None]
        else:
            # of what is not left out, and of it scaled
            size, scaled = torch.linalg.vector_norm(lengths * torch.stack([s.sign(), s]), dim=-1).unbind()
            sizes.append(size)
            scale = (s / scaled.clamp_(min=SMALLEST)[..., None])[..., None, :]
        torch.mul(own, scale.mT if own is not x else scale, out=place.view(own.shape))
    del place  # the memory of what is iterated
    with fp32_products(precision.products, directions[0].device):
        m, n = together.shape[-2:]
        if n < GRAM_FROM * m:
            for row in STEPS:
                together = _polynomial(together @ together.mT, row) @ together
        else:
            half = dtype is torch.float16
            for rows in (STEPS[:RESTART], STEPS[RESTART:]) if half else (STEPS,):
                together = _gram_steps(together @ together.mT, rows) @ together
    for x, own, s, part in zip(directions, wide, scales, [together] if alone else together.split(counts), strict=True):
        if s is None:
            own.copy_(part.view(own.shape))
        else:
            torch.mul(part.view(own.shape), s[..., :, None] if own is not x else s[..., None, :], out=own)
    return list(zip(directions, sizes, strict=True))


def newton_schulz(x_OI: Tensor, *, precision: Precision = HIGHEST) -> Tensor:
    """:func:`orthogonal_factors` of one direction."""
    return orthogonal_factors([x_OI.clone()], precision=precision)[0][0]


def scale_to(target: Tensor | float, *, size: Tensor, norm: Tensor, full: Tensor | float) -> Tensor:
    """What gives a factor the norm ``target``, less where the direction's entries are below :data:`FULL`.

    Args:
        target: a Frobenius norm.
        size, norm: those of the direction, and of its factor in any basis. Of zero: 0.
        full: :data:`FULL` times the root of how many entries they have.
    """
    return target * (size / full).clamp(max=1) / norm.clamp(min=SMALLEST)


def flops(O: int, I: int, *, half: bool = False) -> int:  # noqa: E741
    """Of one matrix's products. A step is 4 m^2 n + 2 m^3 in the standard form, and at most 8 m^3 in the Gram form."""
    (m, n), steps = sorted((O, I)), len(STEPS)
    if n < GRAM_FROM * m:
        return steps * (4 * m**2 * n + 2 * m**3)
    # of a step's products r^2, q p, r p and (r p) p a part's first step lacks the second, its last the last two
    parts = 2 if half else 1
    return parts * 4 * m**2 * n + (4 * steps - 3 * parts) * 2 * m**3


def workspace(O: int, I: int) -> int:  # noqa: E741
    """Elements of one matrix's copies and products, at most."""
    m, n = sorted((O, I))
    gram = 4 * m**2 + m * n if n >= GRAM_FROM * m else 0
    return max(2 * m * n + m**2, gram)


def _gram_steps(r_mm: Tensor, rows: Sequence[tuple[float, float, float]]) -> Tensor:
    """Q of the steps, with r the Gram matrix that they begin with, which is given up. r, Q and each step's polynomial p
    commute. Four matrices at a time."""
    q_mm = p_mm = _polynomial(r_mm, rows[0])
    for row in rows[1:]:
        spare_mm = r_mm @ p_mm
        torch.matmul(spare_mm, p_mm, out=r_mm)
        p_mm = _polynomial(r_mm, row, out=spare_mm)
        q_mm = q_mm @ p_mm
    return q_mm


def _polynomial(r_mm: Tensor, row: tuple[float, float, float], out: Tensor | None = None) -> Tensor:
    """a I + b r + c r^2. a goes on the diagonal: as the product's addend, a matrix would be copied first."""
    a, b, c = row
    plus = torch.addmm if r_mm.ndim == 2 else torch.baddbmm
    p_mm = plus(r_mm, r_mm, r_mm, beta=b, alpha=c, out=out)
    p_mm.diagonal(dim1=-2, dim2=-1).add_(a)
    return p_mm
