"""Which ranks give a factor its rows: pure, near its eigen worker, all of them in turn."""

from collections import Counter

import pytest

from ds_kfac.assignment.assign import ROWS_PER_COLUMN, Contributors, counted, strides
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec
from tests.models import linear_layer

STEPS = range(0, 20000, 10)


def test_all_ranks_where_no_number_is_known():
    assert list(Contributors(5).of("x/A", 3, 7)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 2, 4, 7, 16])
def test_as_many_as_asked_each_once(count):
    contributors = Contributors(16, 4, {"x/A": count})
    for owner in (0, 5, 15):
        for step in STEPS[:50]:
            ranks = contributors.of("x/A", owner, step)
            assert (
                list(ranks) == sorted(set(ranks))
                and len(ranks) == count
                and set(ranks) <= set(range(16))
            )
            assert owner in ranks


@pytest.mark.parametrize("count", [1, 3, 4])
def test_near_the_eigen_worker_first(count):
    contributors = Contributors(16, 4, counts={"x/A": count})
    assert all(set(contributors.of("x/A", 6, step)) <= {4, 5, 6, 7} for step in STEPS)
    wide = Contributors(16, 4, counts={"x/A": count + 4})
    assert all({4, 5, 6, 7} <= set(wide.of("x/A", 6, step)) for step in STEPS[:50])


def test_a_last_node_may_be_smaller():
    assert set(Contributors(6, 4, counts={"x/A": 2}).of("x/A", 5, 0)) == {4, 5}


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
    assert set(seen) == (
        {4, 5} if expected == 2 else {4, 5, 6, 7} if expected == 4 else set(range(8))
    )


def test_a_sequence_over_several_nodes_contributes_together():
    contributors = Contributors(8, 2, {"x/A": 1}, sequence=4)
    assert all(contributors.of("x/A", 6, step) == (4, 5, 6, 7) for step in STEPS[:20])


def test_counts_are_as_many_as_have_the_rows():
    layers = [linear_layer("wide", 1000, 3), linear_layer("narrow", 10, 3)]
    factors = factor_specs(layers)
    rows = dict.fromkeys(["wide/A", "wide/G", "narrow/A", "narrow/G"], 500.0)
    need = ROWS_PER_COLUMN * 1000 / 500
    assert counted(factors, rows, 64, wanted=None) == {
        "wide/A": need,
        "wide/G": 1,
        "narrow/A": 1,
        "narrow/G": 1,
    }
    assert counted(factors, rows, 4, wanted=None) == {"wide/G": 1, "narrow/A": 1, "narrow/G": 1}, (
        "the others have all"
    )
    assert counted(factors, rows, 64, wanted=1200) == dict.fromkeys(
        ["wide/A", "wide/G", "narrow/A", "narrow/G"], 3
    )
    assert counted(factors, {"narrow/A": 500.0}, 64, wanted=None).keys() == {"narrow/A"}
    assert counted(factors, {"wide/A": 0.0, "narrow/A": 0.01}, 64, wanted=None) == {}, (
        "few rows: all ranks"
    )


def test_strides_leave_the_rows_of_an_update_and_less_than_twice_as_many():
    factors = factor_specs([linear_layer("wide", 1000, 3), linear_layer("narrow", 10, 3)])
    rows = {"wide/A": 500.0, "wide/G": 500.0, "narrow/A": 500.0, "narrow/G": 30.0}
    found = strides(factors, rows, wanted=None)
    assert found == {"wide/G": 500 // (3 * ROWS_PER_COLUMN), "narrow/A": 12, "narrow/G": 2}
    assert (
        strides(factors, rows, wanted=400) == {}
        and strides(factors, rows, wanted=250)["narrow/A"] == 2
    )
    assert strides(factors, rows, wanted=400, together=2)["narrow/A"] == 2, (
        "two ranks have the parts of a sequence"
    )


def test_blocks_need_rows_for_their_width_and_diagonals_for_each_entry():
    A, G = Side.blocks_of(1000, 100), Side.diagonal(5000)
    layer = LayerSpec("x", "Linear", "x", "x.weight", None, A, G)
    found = counted(factor_specs([layer]), {"x/A": 100.0, "x/G": 100.0}, 1024, wanted=None)
    assert found == {"x/A": ROWS_PER_COLUMN, "x/G": ROWS_PER_COLUMN * 50}
