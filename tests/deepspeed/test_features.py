"""Every feature trains like tests/oracle.py; the table is in tests/deepspeed/features.py."""

import pytest

from tests.deepspeed.features import compared, rows
from tests.spread import within


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mode", "world"), rows(), ids=["-".join(map(str, row)) for row in rows()]
)
def test_every_feature_matches_reference(name, mode, world):
    assert not within(f"{name} {mode}", *compared(name, mode))
