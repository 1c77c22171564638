"""Cases of one table that share a spawn of ranks, and are tests of their own all the same."""

import pytest

from tests.ranks import run_ranks


@pytest.fixture
def compared(request):
    """The result of a case by ``tests.deepspeed.runs:compare``, for tests with the parameters
    ``world`` and ``case``.

    The cases of a test that are selected and have the same world, and the same value of a parameter
    ``dtype`` if there is one, run in one spawn, the first time one of them is asked for; if that
    spawn dies, each by itself, so that only those that fail say so.
    """
    results = request.config.stash.setdefault(RESULTS, {})
    node, params = request.node, request.node.callspec.params
    key = (node.originalname, params["world"], params.get("dtype"))
    if key not in results:
        alike = [
            item.callspec.params["case"]
            for item in request.session.items
            if getattr(item, "originalname", None) == node.originalname
            and item.path == node.path
            and (item.callspec.params["world"], item.callspec.params.get("dtype")) == key[1:]
        ]
        try:
            results[key] = run(params["world"], alike)
        except AssertionError:
            if len(alike) == 1:
                raise
            results[key] = {}
    if params["case"] not in results[key]:
        results[key] |= run(params["world"], [params["case"]])
    return results[key][params["case"]]


RESULTS = pytest.StashKey[dict]()


def run(world: int, cases: list) -> dict:
    return run_ranks("tests.deepspeed.runs:compare", world=world, payload=cases)[0]
