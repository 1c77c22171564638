"""``@pytest.mark.ranks(2)``: the body of a test runs on two ranks, and what it asserts is asserted
there.

The number may be a parameter ``world`` of the test instead. Its arguments are parameters, not
fixtures. Tests of one function that run on the same number of ranks share a spawn: the selected
ones run the first time that one of them is asked for. If that spawn dies, each runs by itself, so
that only those that fail say so. Tests with different values of a parameter ``dtype`` share none.
"""

import inspect
import warnings

import pytest

from tests.close import RATIOS
from tests.ranks import run_ranks

DONE = pytest.StashKey[set]()
"""Ids of tests whose bodies have run without an error."""
TRIED = pytest.StashKey[set]()
"""Spawns that were tried."""
TIMEOUT = 900


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(world): run the body of the test on every rank")


def pytest_itemcollected(item):
    if item.get_closest_marker("ranks"):
        item.add_marker("distributed")


def parameters(item) -> dict:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def spawn_of(item) -> tuple | None:
    """Return what a test shares with others of its spawn; None if it runs in this process."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    world = mark.args[0] if mark.args else parameters(item)["world"]
    return world, item.path, item.originalname, parameters(item).get("dtype")


def call_of(item) -> tuple:
    accepted = inspect.signature(item.function).parameters
    arguments = {name: value for name, value in parameters(item).items() if name in accepted}
    return item.nodeid, item.function.__module__, item.originalname, arguments


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    spawn = spawn_of(pyfuncitem)
    if spawn is None:
        return None
    done, tried = (pyfuncitem.config.stash.setdefault(key, set()) for key in (DONE, TRIED))

    def run(items) -> None:
        calls = [call_of(item) for item in items]
        for ratios in run_ranks(
            "tests.deepspeed.ranked:bodies", world=spawn[0], payload=calls, timeout=TIMEOUT
        ):
            for test, ratio in ratios.items():
                RATIOS[test] = max(RATIOS.get(test, 0.0), ratio)
        done.update(item.nodeid for item in items)

    if spawn not in tried:
        tried.add(spawn)
        alike = [item for item in pyfuncitem.session.items if spawn_of(item) == spawn]
        try:
            run(alike)
        except AssertionError as error:
            if len(alike) == 1:
                raise
            warnings.warn(f"{len(alike)} tests run one by one: {error}", stacklevel=2)
    if pyfuncitem.nodeid not in done:
        run([pyfuncitem])
    return True
