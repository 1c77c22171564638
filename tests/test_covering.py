"""The choice of cases: complete, small, the same every time."""

from itertools import product

import pytest

from tests.covering import covering, pairs, some

FACTORS = {"a": "xyz", "b": "123", "c": "pq", "d": "uv", "e": "mno"}
TABLE = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


@pytest.mark.parametrize("table", [TABLE, TABLE[::3], TABLE[::-7]], ids=len)
def test_every_pair_of_the_table_is_in_a_chosen_case(table):
    chosen = covering(table, dict)
    for (first, one), (second, other) in set().union(*map(pairs, table)):
        assert any(case[first] == one and case[second] == other for case in chosen)


def test_few_cases_are_chosen_in_their_order():
    chosen = covering(TABLE, dict)
    assert 9 <= len(chosen) <= 13 < len(TABLE) / 8, (
        "nine pairs of two factors of three values need as many"
    )
    assert [TABLE.index(case) for case in chosen] == sorted(TABLE.index(case) for case in chosen)
    assert chosen == covering(TABLE, dict)


def test_every_case_runs_on_one_rank_and_on_two_or_on_four():
    assert some(TABLE, 1) == TABLE
    assert sorted(some(range(9), 2) + some(range(9), 4)) == list(range(9)) and some(
        range(9), 4
    ) == [0, 3, 4, 7, 8]


def test_what_must_be_there_always_is():
    chosen = covering(TABLE, dict, lambda case: ["this"] if case == TABLE[-5] else [])
    assert TABLE[-5] in chosen
