"""Orthogonal factors of directions: both forms, every precision, column scales, cost."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.single import newton_schulz
from ds_kfac.curvature.eigen import HIGHEST, Precision
from ds_kfac.update.newton_schulz import GRAM_FROM, STEPS, flops, orthogonal_factors
from tests.close import close, near

HALF = Precision("tf32", "tf32")


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steep(m: int, n: int, decades: float) -> torch.Tensor:
    """With singular values over so many decades."""
    U, _, Vh = torch.linalg.svd(normal(m, n).double(), full_matrices=False)
    return ((U * torch.logspace(0, -decades, m, dtype=U.dtype)) @ Vh).float()


def spelt_out(x: torch.Tensor) -> torch.Tensor:
    """The iteration as it is written, in float64."""
    x = x.double() / x.double().norm()
    for a, b, c in STEPS:
        r = x @ x.T
        x = a * x + b * r @ x + c * r @ r @ x
    return x


@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 9), (48, 48), (48, 83), (48, 84), (48, 200)])
def test_both_forms_are_the_iteration_in_every_precision(shape, decades):
    x = steep(*shape, decades)
    exact = spelt_out(x)
    # Rounding makes what it likes of the smallest singular values, and five steps lift them by up
    # to 3.4^5; in the Gram form it is their squares that are rounded.
    fp32 = 1e-5 if shape[1] < GRAM_FROM * shape[0] else 5e-3
    for precision, bound in ((HIGHEST, fp32), (HALF, 0.1)):
        along, across = (newton_schulz(y, precision=precision) for y in (x, x.T))
        for factor in (along, across.T):
            assert float((factor - exact).norm() / exact.norm()) < bound, precision
            assert torch.linalg.svdvals(factor).max() < 1.25


@pytest.mark.parametrize("precision", [HIGHEST, HALF])
@pytest.mark.parametrize("shape", [(9, 9), (6, 9), (6, 40), (40, 6)])
def test_rows_and_columns_that_are_left_out_stay_out(shape, precision):
    """To the bit, in either form of the iteration: it lifts what is small, but nothing from zero.
    The others, and the size that the direction had, are as without them."""
    x, s = normal(2, *shape), torch.rand(shape[1], generator=torch.Generator().manual_seed(2)) + 0.2
    x[:, 1], s[[0, 3]] = 0.0, 0.0
    rows = [i for i in range(shape[0]) if i != 1]
    columns = [i for i in range(shape[1]) if i not in (0, 3)]
    bound = 0.01 if precision is HALF else 1e-4
    factors, scales = x.clone(), torch.stack([(s > 0).float(), s])  # as of Rotation.whitening
    (sizes,) = orthogonal_factors(
        [factors], [scales[:, None].expand(-1, 2, -1)], precision=precision
    )
    assert torch.count_nonzero(factors[:, 1]) == torch.count_nonzero(factors[:, :, [0, 3]]) == 0
    for factor, size, own in zip(factors, sizes, x, strict=True):
        rest = own[rows][:, columns]
        close(size, rest.norm(), sums=rest.numel())
        expected = spelt_out(rest * s[columns]) * s[columns]
        off = float((factor[rows][:, columns] - expected).norm() / expected.norm())
        near(off, 0.0, bound, "five steps in that precision lift what they round")


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (31, 16), (16, 32), (48, 16)])
def test_flops_are_those_that_are_done(shape, half):
    with FlopCounterMode(display=False) as counter:
        newton_schulz(normal(*shape), precision=HALF if half else HIGHEST)
    assert counter.get_total_flops() == flops(*shape, half=half)
