"""The cost model is a power law through its table."""

import math
from dataclasses import replace

import pytest

from ds_kfac.assignment.costs import BUILTIN, CostModel
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.iteration import FLOPS as STEP_FLOPS
from ds_kfac.curvature.methods import ITERATED
from tests.close import close
from tests.models import linear_layer

UNIT = CostModel(((10, 1.0), (20, 4.0)), ((10, 0.5), (20, 1.0)), 2.0, 3.0, 5.0, 0.0, 7.0, 11.0)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(2, 1.0), (10, 1.0), (14, 1.96), (20, 4.0), (40, 32.0)],
    ids=["floor", "at", "in", "end", "n^3"],
)
def test_eigh_goes_through_its_table_and_on_as_n_cubed(n, expected):
    close(UNIT.decompose(Side.dense(n)), expected)
    close(UNIT.decompose(Side(3 * n, n)), 3 * expected)


@pytest.mark.parametrize("kind", BUILTIN)
def test_builtin_eigh_never_falls_with_n_and_is_nearly_cubic_in_the_end(kind):
    seconds = [BUILTIN[kind].decompose(Side.dense(n)) for n in range(2, 20000, 37)]
    assert seconds == sorted(seconds)
    long, short = (BUILTIN[kind].decompose(Side.dense(n)) for n in (20000, 10000))
    close(long, 8 * short)


def test_a_step_from_the_last_basis_is_products_and_a_third_of_two_inverses_and_eigh_every_tenth():
    costs = replace(UNIT, ieee_flops=1000.0, gemm_flops=2000.0)
    step = (STEP_FLOPS - 2 / 3) * 20**3 / 1000.0 + 2 / 3 * 1.0
    close(costs.step(20), step)
    close(replace(costs, gemm_flops=500.0).step(20), 2 * step - 2 / 3 * 1.0)  # TF32 is no slower
    dear = replace(costs, eigh_seconds=((20, 1000.0),))
    close(
        dear.decompose(Side(45, 20), ITERATED),
        (2 * (1000.0 + 9 * step) + (1000.0 + 9 * costs.step(5))) / 10,
    )
    # where eigh is the faster one it is all there is
    close(costs.decompose(Side.dense(20), ITERATED), 4.0)
    assert BUILTIN["cpu"].ieee_flops == 0


def test_structure_makes_a_side_cheaper():
    costs = replace(UNIT, copy_bytes=math.inf)
    layer = linear_layer("l", 5, 3)
    only_G = 4 * 5 * 3 * 3 / 2.0
    close(costs.precondition(replace(layer, A=Side.diagonal(5))), only_G)
    close(costs.precondition(replace(layer, A=Side.identity(5))), only_G)
    close(costs.precondition(replace(layer, A=Side(5, 2))), only_G + 4 * 3 * (4 + 4 + 1) / 2.0)
    close(UNIT.decompose(Side(45, 20)), 2 * 4.0 + 1.0)
    close(UNIT.decompose(Side.diagonal(45)), 2 * 4 * 45 / 5.0)
    assert UNIT.decompose(Side.identity(45)) == 0
