"""The cost model is a power law through its table. Costs from a file take the place of builtin
ones; what is wrong in it is named."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import costs as command
from ds_kfac.assignment.costs import BUILTIN, CostModel, measured
from ds_kfac.curvature.factor import Side
from tests.close import close
from tests.models import linear_layer

UNIT = CostModel(((10, 1.0), (20, 4.0)), ((10, 0.5), (20, 1.0)), 2.0, 3.0, 5.0, 0.0, 7.0, 11.0)
FILE = {
    "machine": "a card",
    "eigh_seconds": [[8, 1.0], [16, 8.0]],
    "product_flops": [[8, 1.0], [32, 16.0]],
}


def written(tmp_path, content) -> str:
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_what_a_file_has_is_measured_and_the_rest_stays(tmp_path):
    found = measured(BUILTIN["cuda"], written(tmp_path, FILE))
    assert found.measured == {"eigh_seconds", "product_flops"}
    assert found.decompose(Side.dense(16)) == 8.0
    close([found.rate(width) for width in (2, 8, 16, 32, 1e9)], [1.0, 1.0, 4.0, 16.0, 16.0])
    assert replace(found, eigh_seconds=(), product_flops=(), measured=frozenset()) == replace(
        BUILTIN["cuda"], eigh_seconds=(), product_flops=()
    )


def test_builtin_rates_of_a_gpu_are_those_that_one_showed():
    """To two digits."""
    file = Path(__file__).parents[2] / "benchmarks/results/gpu/costs.json"
    found, builtin = measured(BUILTIN["cuda"], str(file)), BUILTIN["cuda"]
    for name in found.measured:
        shown, taken = (torch.tensor(getattr(costs, name)) for costs in (found, builtin))
        assert float((taken / shown - 1).abs().max()) < 0.06, (name, shown, taken)


@pytest.mark.parametrize(
    "content, what",
    [
        ("{", "Expecting"),
        ([], "not an object"),
        ({"eigh": 1}, "eigh is none of eigh_seconds"),
        ({"gemm_flops": 0}, "0 is not a positive number"),
        ({"gemm_flops": True}, "True is not a positive number"),
        ({"eigh_seconds": [[16, 1.0], [8, 1.0]]}, "eigh_seconds: sizes must be in ascending"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path, content, what):
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match="--costs ") as problem:
        measured(BUILTIN["cpu"], path)
    assert path in str(problem.value) and what in str(problem.value)


def test_the_command_writes_what_a_plan_reads(tmp_path):
    path = tmp_path / "costs.json"
    command.main(["--device", "cpu", "--max-dim", "64", "--seconds", "0.01", "--out", str(path)])
    found = measured(BUILTIN["cpu"], str(path))
    assert found.measured == {*command.FIELDS}
    assert found.decompose(Side.dense(64)) > found.decompose(Side.dense(16)) > 0


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
