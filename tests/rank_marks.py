"""``@pytest.mark.ranks(2)``: the body of a test runs on two ranks, and what it asserts is asserted
there.

The number may be a parameter ``world`` of the test instead. Options of ``run_ranks`` may follow it.
A test's arguments are parameters, or fixtures whose values can be pickled. Tests of one function
that run on the same number of ranks and have no fixtures share a spawn: the selected ones run the
first time that one of them is asked for. If that spawn dies, each runs by itself, so that only
those that fail say so. Tests share none if their parameters ``dtype`` have different values, or
their parameters ``kind`` different classes.

``tests/conftest.py`` imports these hooks.
"""

import inspect
import warnings
from typing import Any

import pytest

from tests.close import RATIOS
from tests.ranks import run_ranks

DONE = pytest.StashKey[set]()
"""Ids of tests whose bodies have run without an error."""
TRIED = pytest.StashKey[set]()
"""Spawns that were tried."""
TIMEOUT = 900


def pytest_itemcollected(item):
    if item.get_closest_marker("ranks"):
        item.add_marker("distributed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    stash = pyfuncitem.config.stash
    done = stash.setdefault(DONE, set())
    tried = stash.setdefault(TRIED, set())
    spawn = spawn_of(pyfuncitem)
    if spawn is not None and spawn not in tried:
        tried.add(spawn)
        alike = [item for item in pyfuncitem.session.items if spawn_of(item) == spawn]
        if len(alike) > 1:
            try:
                run(alike)
                done.update(item.nodeid for item in alike)
            except AssertionError as error:
                warnings.warn(f"{len(alike)} tests run one by one: {error}", stacklevel=2)
    if pyfuncitem.nodeid not in done:
        run([pyfuncitem])
    return True


def parameters(item) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def world_of(item) -> int:
    mark = item.get_closest_marker("ranks")
    return mark.args[0] if mark.args else parameters(item)["world"]


def spawn_of(item) -> tuple | None:
    """Return what a test shares with others of its spawn; None if it shares none."""
    mark = item.get_closest_marker("ranks")
    if mark is None or inspect.signature(item.function).parameters.keys() - parameters(item):
        return None
    values = parameters(item)
    apart = values.get("dtype"), type(values.get("kind"))
    return world_of(item), item.path, item.originalname, apart


def run(items: list) -> None:
    """Run the bodies of tests in one spawn."""
    calls = []
    for item in items:
        names = inspect.signature(item.function).parameters
        given = {**item.funcargs, **parameters(item)}
        arguments = {name: given[name] for name in names}
        calls.append((item.nodeid, item.function.__module__, item.originalname, arguments))
    options = {"timeout": TIMEOUT, **items[0].get_closest_marker("ranks").kwargs}
    for ratios in run_ranks(
        "tests.ranks:bodies", world=world_of(items[0]), payload=calls, **options
    ):
        for test, ratio in ratios.items():
            RATIOS[test] = max(RATIOS.get(test, 0.0), ratio)
