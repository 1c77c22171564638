"""Which cases of a table run, and in which order: few, the same every time, long files first."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LONGEST, pytest_collection_modifyitems
from tests.covering import covering, pairs, some

TESTS = Path(__file__).parent
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


def test_every_case_runs_on_one_rank_and_on_two_or_on_four():
    assert some(TABLE, 1) == TABLE and some(range(9), 4) == [0, 3, 4, 7, 8]
    assert sorted(some(range(9), 2) + some(range(9), 4)) == list(range(9))


def test_long_files_begin_and_tests_of_one_process_end():
    assert len({*LONGEST}) == len(LONGEST) and all((TESTS / name).is_file() for name in LONGEST)
    several = "deepspeed/test_kfac_adamw.py"
    items = []
    for name in ("test_close.py", several, *LONGEST[::-1]):
        marks = {"distributed": True} if name == several else {}
        items.append(SimpleNamespace(path=TESTS / name, get_closest_marker=marks.get))
    pytest_collection_modifyitems(items)
    order = [item.path.relative_to(TESTS).as_posix() for item in items]
    assert order == [*LONGEST, several, "test_close.py"]
