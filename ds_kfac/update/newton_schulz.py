"""Replace directions by their orthogonal factors: all singular values are set to about one, as in
Muon.

Note: Two forms of the iteration. Let m be the shorter and n the longer side of the matrix.

- The standard form, for n < 1.75 m, multiplies the matrix itself by a polynomial in every step.
- The Gram form, for wider matrices, iterates only the Gram matrix [m, m], and multiplies the matrix
  by the result once at the end. This is cheaper (gram-newton-schulz, Dao-AILab).

Note: Precision. In the Gram form, later steps never correct a rounding error. In 16 bits the Gram
matrix is therefore computed again after :data:`RESTART` steps. Even then, bf16 is too coarse. In 16
bits we use fp16 for both forms, because a matrix of norm one needs no large exponents, and fp16
rounds eight times finer than bf16 at the same speed.

Note: Size. The orthogonal factor always has the same norm, however small the direction is. When
gradients vanish, so does Adam's direction, and the layer must not keep moving along rounding errors
and old moments. If the root mean square of Adam's direction is below :data:`FULL`, the step
therefore shrinks in proportion to it.

Shape suffixes: O and I are the sides of a matrix, m is its shorter side, and n is its longer side.
In :func:`orthogonal_factors`, n is also a number of matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Precision, fp32_products
from ds_kfac.ops.functional import SMALLEST

STEPS = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients (a, b, c) of the polynomial x (a + b x^2 + c x^4), one row for each step. Jordan et
al. 2024 tuned them to raise small singular values fast. At the end all singular values are between
0.7 and 1.2."""
GRAM_FROM = 1.75
"""Smallest ratio n / m for which the Gram form is used. From this ratio on, this form is at least
7 % cheaper. At a ratio of 1.5 both forms cost the same. The limit is below 2 so that it includes a
fused gate and up projection with a bias, [2 m, m + 1]."""
RESTART = 2
"""Number of steps after which the Gram matrix is computed again if the iteration is in 16 bits."""
FULL = 0.03
"""Smallest root mean square of Adam's direction at which a step has its full size. In ordinary
training the root mean square is 0.1 to 0.3, because Adam's direction is signal divided by noise. In
150 steps of gpt_small and mlm (benchmarks/convergence) it was never below 0.032."""


def orthogonal_factors(
    directions: Sequence[Tensor],
    whitenings: Sequence[Tensor | None] | None = None,
    *,
    precision: Precision = HIGHEST,
) -> list[Tensor]:
    """Replace each direction x = U S V^T by U V^T, approximately.

    All directions must have the same longer and the same shorter side, because they are iterated
    together.

    Args:
        directions: fp32 tensors [n, O, I], which are overwritten. Rows and columns of zeros stay
            exactly zero.
        whitenings: for each direction, a tensor [2, n, I] as ``Rotation.whitening`` returns it, or
            None. With whitening factors s, the direction x is replaced by (the orthogonal factor of
            x diag(s)) diag(s). A column whose s is 0 becomes 0.
        precision: precision of the products. If it is TF32, the iteration uses fp16 instead, which
            rounds like TF32 but is twice as fast.

    Returns for each direction the Frobenius norms [n] that its matrices had before the call,
    without the columns whose s is 0.
    """
    whitenings = whitenings or [None] * len(directions)
    dtype = torch.float16 if precision.products == "tf32" else directions[0].dtype
    wide = [x.mT if x.shape[-2] > x.shape[-1] else x for x in directions]  # the longer side last
    counts = [len(x) for x in wide]
    norms: list[Tensor] = []
    # the only copy of the directions that this function makes
    x = torch.empty(sum(counts), *wide[0].shape[-2:], dtype=dtype, device=wide[0].device)
    for direction, rows, whitening, place in zip(
        directions, wide, whitenings, x.split(counts), strict=True
    ):
        # Scale to norm one. Together, scaling and whitening take two passes over a direction.
        if whitening is None:
            norm = torch.linalg.vector_norm(direction, dim=(-2, -1))
            scale = norm.clamp(min=SMALLEST).reciprocal()[:, None, None]
        else:
            column_norms = torch.linalg.vector_norm(direction, dim=-2)
            # whitening[0] is 0 or 1, so the first norm is over the columns whose s is above 0
            norm, whitened_norm = torch.linalg.vector_norm(column_norms * whitening, dim=-1)
            scale = (whitening[1] / whitened_norm.clamp(min=SMALLEST)[:, None])[:, None, :]
        norms.append(norm)
        torch.mul(rows, scale.mT if rows is not direction else scale, out=place)
    del place  # a view, which would keep x in memory
    if len(x) == 1:
        x = x[0]  # batched products with a batch of one are slower than products of a matrix
    m, n = x.shape[-2:]
    with fp32_products(precision.products, x.device):
        if n < GRAM_FROM * m:
            for coefficients in STEPS:
                x = _polynomial(x @ x.mT, coefficients) @ x
        else:
            restarts = dtype is torch.float16
            for steps in (STEPS[:RESTART], STEPS[RESTART:]) if restarts else (STEPS,):
                x = _gram_steps(x @ x.mT, steps) @ x
    for direction, rows, whitening, part in zip(
        directions, wide, whitenings, x.view(-1, m, n).split(counts), strict=True
    ):
        if whitening is None:
            rows.copy_(part)
        else:
            s = whitening[1, :, None]
            torch.mul(part, s.mT if rows is not direction else s, out=rows)
    return norms


def flops(O: int, I: int, *, half: bool = False) -> int:  # noqa: E741
    """Return the FLOPs of the iteration's products for one matrix.

    A step takes 4 m^2 n + 2 m^3 in the standard form, and at most 8 m^3 in the Gram form.

    Args:
        half: whether the iteration is in fp16. The Gram form then restarts once.
    """
    m, n = sorted((O, I))
    steps = len(STEPS)
    if n < GRAM_FROM * m:
        return steps * (4 * m**2 * n + 2 * m**3)
    # A step has four products of m x m matrices: r^2, q p, r p and (r p) p. The first step of each
    # part lacks q p, and the last step lacks r p and (r p) p.
    parts = 2 if half else 1
    return parts * 4 * m**2 * n + (4 * steps - 3 * parts) * 2 * m**3


def workspace(O: int, I: int) -> int:  # noqa: E741
    """Return the number of elements of memory that the iteration of one matrix needs for copies and
    products."""
    m, n = sorted((O, I))
    standard = 2 * m * n + m**2
    gram = 4 * m**2 + m * n if n >= GRAM_FROM * m else 0
    return max(standard, gram)


def _gram_steps(r_mm: Tensor, rows: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return q, the product of the polynomials p of all steps, where r is the Gram matrix.

    r, q and p commute. At most four matrices [m, m] are in memory at the same time.

    Args:
        r_mm: the Gram matrix, overwritten.
        rows: coefficients of the steps.
    """
    q_mm = p_mm = _polynomial(r_mm, rows[0])
    for row in rows[1:]:
        spare_mm = r_mm @ p_mm
        torch.matmul(spare_mm, p_mm, out=r_mm)
        p_mm = _polynomial(r_mm, row, out=spare_mm)
        q_mm = q_mm @ p_mm
    return q_mm


def _polynomial(r_mm: Tensor, row: tuple[float, float, float], out: Tensor | None = None) -> Tensor:
    """Return a I + b r + c r^2. The term a I is added last, in place on the diagonal, because torch
    would copy a matrix that it adds to a product."""
    a, b, c = row
    add_product = torch.addmm if r_mm.ndim == 2 else torch.baddbmm
    p_mm = add_product(r_mm, r_mm, r_mm, beta=b, alpha=c, out=out)
    p_mm.diagonal(dim1=-2, dim2=-1).add_(a)
    return p_mm
