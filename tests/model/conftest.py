"""What a test of this folder leaves behind in the process."""

import pytest

from ds_kfac.model import products


@pytest.fixture(autouse=True)
def nothing_stays_watched():
    """A test that ends with a backward pass still to come leaves its model watched until Python
    collects the cycle, and all backward passes of later tests would run through these modes."""
    yield
    products._in_backward.clear()
