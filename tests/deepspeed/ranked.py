"""Run the bodies of tests on every rank; see ``ranks`` in tests/deepspeed/conftest.py."""

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.close import RATIOS
from tests.deepspeed import runs

Call = tuple[str, str, str, dict[str, Any]]
"""A test's id, its module, its function and its arguments."""


def bodies(calls: list[Call]) -> dict[str, float]:
    """Run several tests one after the other, with their engines destroyed in between; return what
    tests/close.py measured in each."""
    for test, module, function, arguments in calls:
        os.environ["PYTEST_CURRENT_TEST"] = test
        print(f"running {test}")
        getattr(importlib.import_module(module), function)(**arguments)
        torch.set_default_dtype(torch.float32)
        runs.destroy_all()
    return RATIOS


def of_ranks(value: Any) -> list[Any]:
    """Return this value of every rank. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_0(action) -> Any:
    """Return to every rank what ``action`` returns on the first one; the others wait, as ranks
    share cores. Collective."""
    found = [action() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]
