"""Which ranks give a factor its rows: pure, near its owner, all of them in turn."""

from collections import Counter

import pytest

from ds_kfac.assignment.assign import ROWS_PER_COLUMN, Contributors, counted, strides
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec
from tests.models import linear_layer

STEPS = range(0, 20000, 10)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_as_many_as_asked_each_once_near_the_owner_first(count):
    contributors = Contributors(16, 4, {"x/A": count})
    for owner in (0, 5, 15):
        node = {rank for rank in range(16) if rank // 4 == owner // 4}
        for step in STEPS[:50]:
            ranks = list(contributors.of("x/A", owner, step))
            assert ranks == sorted(set(ranks)) and len(ranks) == count
            assert owner in ranks and max(ranks) < 16
            assert set(ranks) <= node or node <= set(ranks)
    assert list(contributors.of("no number is known", 0, 7)) == list(range(16))
    assert set(Contributors(6, 4, {"x/A": 2}).of("x/A", 5, 0)) == {4, 5}, "a smaller last node"


def test_every_rank_of_the_node_gets_its_turn_equally_often():
    """Also where updates are ten steps apart."""
    contributors, seen = Contributors(16, 4, {"x/A": 2}), Counter()
    for step in STEPS:
        seen.update(set(contributors.of("x/A", 6, step)) - {6})
    expected = len(STEPS) / 3
    assert set(seen) == {4, 5, 7}
    assert all(abs(count - expected) < 6 * expected**0.5 for count in seen.values())


@pytest.mark.parametrize(("count", "expected"), [(1, 2), (2, 2), (3, 4), (7, 8), (8, 8)])
def test_the_parts_of_a_sequence_contribute_together(count, expected):
    """Else a factor would see one part of all sequences for ever."""
    contributors = Contributors(8, 4, {"x/A": count}, sequence=2)
    seen = Counter()
    for step in STEPS[:200]:
        ranks = list(contributors.of("x/A", 5, step))
        assert len(ranks) == expected and {4, 5} <= set(ranks) and ranks == sorted(set(ranks))
        assert all(rank ^ 1 in ranks for rank in ranks), "two ranks have a sequence"
        seen.update(ranks)
    assert set(seen) == {2: {4, 5}, 4: {4, 5, 6, 7}, 8: set(range(8))}[expected]
    over_nodes = Contributors(8, 2, {"x/A": 1}, sequence=4)
    assert all(over_nodes.of("x/A", 6, step) == (4, 5, 6, 7) for step in STEPS[:20])


def test_ranks_and_strides_leave_the_rows_of_an_update():
    A = linear_layer("dense", 1000, 3)
    other = LayerSpec("x", "Linear", "x", "w", None, Side.blocks_of(1000, 100), Side.diagonal(5000))
    factors = factor_specs([A, other])
    rows = dict.fromkeys(["dense/A", "dense/G", "x/A", "x/G"], 500.0)
    counts = counted(factors, rows, 1024, wanted=None)
    per_column = ROWS_PER_COLUMN / 500
    expected = {"dense/A": 1000 * per_column, "dense/G": 1, "x/A": 1, "x/G": 5000 * per_column}
    assert counts == expected
    assert "dense/A" not in counted(factors, rows, 4, wanted=None), "all ranks"
    assert counted(factors, {"dense/A": 0.0, "dense/G": 0.01}, 64, wanted=None) == {}, "few rows"
    assert strides(factors, {"dense/G": 500.0}, wanted=None) == {
        "dense/G": 500 // (3 * ROWS_PER_COLUMN)
    }
    assert strides(factors, rows, wanted=400) == {}
    assert strides(factors, rows, wanted=250)["dense/A"] == 2
    together = strides(factors, rows, wanted=400, together=2)
    assert together["dense/A"] == 2, "two ranks have the parts of a sequence"
