"""Long files of tests begin, so that two workers end together."""

from pathlib import Path
from types import SimpleNamespace

from tests.conftest import LONGEST, pytest_collection_modifyitems

TESTS = Path(__file__).parent


def test_long_files_begin_and_tests_of_one_process_end():
    assert len(set(LONGEST)) == len(LONGEST) and all(
        (TESTS / name).is_file() for name in LONGEST
    ), LONGEST
    items = []
    for name, *marks in [
        ("test_close.py",),
        ("deepspeed/test_lifecycle.py", "distributed"),
        *((n,) for n in LONGEST[::-1]),
    ]:
        found = {"distributed"}.intersection(marks)
        items.append(
            SimpleNamespace(
                path=TESTS / name,
                get_closest_marker=lambda mark, found=found: mark if mark in found else None,
            )
        )
    pytest_collection_modifyitems(items)
    order = [item.path.relative_to(TESTS).as_posix() for item in items]
    assert order == [*LONGEST, "deepspeed/test_lifecycle.py", "test_close.py"]
