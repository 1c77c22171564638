"""The short form of make processors: no comparison is near its bound when sums come in another
order."""

import pytest

from tests import processors


def test_other_orders_of_sums_stay_below_the_limit(capsys):
    status = processors.main(["--only", "ATen default", "shuffled 1", "--", *processors.SHORT])
    told = capsys.readouterr().out
    print(told)
    assert status == 0, told
    assert told.count("compared") == 2 and "failed" not in told


@pytest.mark.parametrize("body", ["close(1.0 + 1e-15, 1.0)", "assert False"])
def test_tests_near_their_bounds_are_found_by_running_them(body, tmp_path, capsys):
    """1e-15 is half of what float64 is allowed."""
    path = tmp_path / "test_near.py"
    path.write_text(f"from tests.close import close\n\n\ndef test_near():\n    {body}\n")
    assert processors.main(["--only", "as it is", "--", str(path)]) == 1
    assert ("over 0.3: 0.6" if "close" in body else "failed: ") in capsys.readouterr().out
