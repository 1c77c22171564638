"""Which cases of a table run, and in which order: few, the same every time, long files first."""

from itertools import product

import pytest

from tests.covering import covering, pairs

FACTORS = {"a": "xyz", "b": "123", "c": "pq", "d": "uv", "e": "mno"}
TABLE = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


@pytest.mark.parametrize("table", [TABLE, TABLE[::3], TABLE[::-7]], ids=len)
def test_every_pair_of_the_table_is_in_one_of_few_cases_in_their_order(table):
    chosen = covering(table, dict, lambda case: ["this"] if case == table[-5] else [])
    assert set().union(*map(pairs, table)) == set().union(*map(pairs, chosen))
    assert table[-5] in chosen, "what must be there always is"
    assert chosen == [case for case in table if case in chosen]
    # nine pairs of two factors of three values need as many
    assert 9 <= len(chosen) <= 15
