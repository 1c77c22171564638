"""The cost model is a power law through its table."""

import math
from dataclasses import replace

import pytest

from ds_kfac.assignment.costs import CostModel
from ds_kfac.curvature.factor import Side
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
