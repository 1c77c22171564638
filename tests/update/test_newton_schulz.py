"""Orthogonal factors of directions: both forms, every precision, matrices together, column scales,
cost."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.single import newton_schulz
from ds_kfac.curvature.eigen import HIGHEST, Precision
from ds_kfac.ops.functional import scale_to
from ds_kfac.update.newton_schulz import FULL, GRAM_FROM, STEPS, flops, orthogonal_factors
from tests.close import close, near

HALF = Precision("tf32", "tf32")
LOW, HIGH = 0.6, 1.25
"""Of singular values that five steps lift all the way."""


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whitening(s: torch.Tensor) -> torch.Tensor:
    """Column scales as of Rotation.whitening."""
    return torch.stack([(s > 0).float(), s])


def factored(
    x: torch.Tensor, s: torch.Tensor | None = None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of one matrix, with column scales [I], and the norm that it had."""
    factor = x.clone()[None]
    (size,) = orthogonal_factors([factor], [None if s is None else whitening(s[None])], **options)
    return factor[0], size[0]


def steep(m: int, n: int, decades: float) -> torch.Tensor:
    """With singular values over so many decades."""
    U, _, Vh = torch.linalg.svd(normal(m, n).double(), full_matrices=False)
    return ((U * torch.logspace(0, -decades, m, dtype=U.dtype)) @ Vh).float()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 9), (9, 4), (4, 9), (63, 63), (20, 63)])
def test_singular_values_are_near_one(rows, columns):
    x = normal(rows, columns)
    U, _, Vh = torch.linalg.svd(x, full_matrices=False)
    factor, size = factored(x)
    values = torch.linalg.svdvals(factor)
    well = torch.linalg.svdvals(x) > 0.02 * x.norm()  # five steps lift nothing smaller all the way
    assert values[well].min() > LOW and values.max() < HIGH
    assert torch.nn.functional.cosine_similarity(factor.flatten(), (U @ Vh).flatten(), dim=0) > 0.95
    close(size, x.norm(), sums=x.numel())
    root = x.numel() ** 0.5
    scaled = factor * scale_to(0.3 * root, size=size, norm=factor.norm(), full=FULL * root)
    close(scaled.square().mean().sqrt(), torch.tensor(0.3), sums=x.numel())


def spelt_out(x: torch.Tensor) -> torch.Tensor:
    """The iteration as it is written, in float64."""
    x = x.double() / x.double().norm()
    for a, b, c in STEPS:
        r = x @ x.T
        x = a * x + b * r @ x + c * r @ r @ x
    return x


@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize("columns", [48, 83, 84, 200])
def test_both_forms_are_the_iteration_in_every_precision(columns, decades):
    x = steep(48, columns, decades)
    exact = spelt_out(x)
    # Rounding makes what it likes of the smallest singular values, and five steps lift them by up
    # to 3.4^5; in the Gram form it is their squares that are rounded.
    for precision, bound in ((HIGHEST, 1e-5 if columns < GRAM_FROM * 48 else 5e-3), (HALF, 0.1)):
        for factor in (
            newton_schulz(x, precision=precision),
            newton_schulz(x.T, precision=precision).T,
        ):
            assert float((factor - exact).norm() / exact.norm()) < bound, precision
            assert torch.linalg.svdvals(factor).max() < 1.25


@pytest.mark.parametrize("precision", [HIGHEST, HALF])
@pytest.mark.parametrize("shape", [(9, 9), (6, 9), (6, 40), (40, 6)])
def test_rows_and_columns_that_are_left_out_stay_out(shape, precision):
    """To the bit, in either form of the iteration: it lifts what is small, but nothing from zero.
    The others, and the size that the direction had, are as without them."""
    x, s = normal(2, *shape), torch.rand(shape[1], generator=torch.Generator().manual_seed(2)) + 0.2
    x[:, 1], s[[0, 3]] = 0.0, 0.0
    kept_rows, kept_columns = (
        [i for i in range(shape[0]) if i != 1],
        [i for i in range(shape[1]) if i not in (0, 3)],
    )
    factors = x.clone()
    (sizes,) = orthogonal_factors([factors], [whitening(s.expand(2, -1))], precision=precision)
    assert torch.count_nonzero(factors[:, 1]) == torch.count_nonzero(factors[:, :, [0, 3]]) == 0
    for factor, size, own in zip(factors, sizes, x, strict=True):
        rest = own[kept_rows][:, kept_columns]
        close(size, rest.norm(), sums=rest.numel())
        expected = spelt_out(rest * s[kept_columns]) * s[kept_columns]
        off = float((factor[kept_rows][:, kept_columns] - expected).norm() / expected.norm())
        near(
            off,
            0.0,
            0.01 if precision is HALF else 1e-4,
            "five steps in that precision lift what they round",
        )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (31, 16), (16, 32), (48, 16)])
def test_flops_are_those_that_are_done(shape, half):
    with FlopCounterMode(display=False) as counter:
        newton_schulz(normal(*shape), precision=HALF if half else HIGHEST)
    assert counter.get_total_flops() == flops(*shape, half=half)
