"""Shared by all tests."""

import contextlib
import json
import logging
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# tests look for whole lines, in processes of their own, too; workers of xdist have 80
os.environ["COLUMNS"] = "1000"

import pytest
import torch

from tests.close import RATIOS
from tests.rank_marks import pytest_itemcollected, pytest_pyfunc_call  # noqa: F401  hooks
from tests.ranks import keep_imports

with contextlib.suppress(ImportError):  # kernels are tested without DeepSpeed, too
    from ds_kfac.step import proving

    proving.RAISES = True

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def caplog(caplog):
    """It hears ds_kfac, too, whose logger hands nothing on to the root's."""
    logging.getLogger("ds_kfac").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("ds_kfac").removeHandler(caplog.handler)


SHUFFLED = os.environ.get("SHUFFLED_SUMS")
"""Seed of other orders of all sums, see tests/shuffled.py."""


def pytest_configure(config):
    """Sums in another order in every test, where SHUFFLED_SUMS says so."""
    config.addinivalue_line("markers", "ranks(world): run the body of the test on every rank")
    if SHUFFLED:
        from tests.shuffled import ShuffledSums

        config.shuffled = ShuffledSums(int(SHUFFLED)).__enter__()


def pytest_unconfigure(config):
    if SHUFFLED:
        config.shuffled.__exit__(None, None, None)


LONGEST = (
    "deepspeed/test_features.py",
    "deepspeed/test_modes.py",
    "deepspeed/test_model_parallel.py",
    "deepspeed/test_same_training.py",
    "integrations/test_startup.py",
    "integrations/test_asked_for.py",
    "deepspeed/test_checkpoint.py",
    "deepspeed/test_estimate.py",
    "examples/test_tutorial.py",
    "deepspeed/test_traps.py",
    "deepspeed/test_gradient_access.py",
    "examples/test_train_gpt.py",
    "deepspeed/test_first_start.py",
    "deepspeed/test_interruptions.py",
    "deepspeed/test_memory.py",
)
"""Files of tests that take more than 15 seconds. They run first: if a worker of pytest-xdist got
one of them last, the other workers would wait for it."""


def pytest_collection_modifyitems(items):
    """Where there is no GPU, its tests say so. Long files come first, then tests of several ranks:
    the short ones fill the end."""

    def place(item) -> tuple[int, bool]:
        path = item.path.as_posix()
        of_long = [index for index, name in enumerate(LONGEST) if path.endswith(f"tests/{name}")]
        return min(of_long, default=len(LONGEST)), not item.get_closest_marker("distributed")

    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    items.sort(key=place)


def pytest_collection_finish():
    keep_imports()


def pytest_sessionfinish(session):
    """A worker of pytest-xdist sends what tests/close.py measured; tests/processors.py reads it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ratios"] = RATIOS
    elif "RATIOS_FILE" in os.environ:
        Path(os.environ["RATIOS_FILE"]).write_text(json.dumps(RATIOS))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    RATIOS.update(getattr(node, "workeroutput", {}).get("ratios", {}))  # without one if it crashed


def pytest_terminal_summary(terminalreporter):
    """How much of what rounding may do was used, see tests/close.py: near 1, a bound is about to be
    met by chance."""
    for test, ratio in sorted(RATIOS.items(), key=lambda pair: -pair[1])[:10]:
        terminalreporter.write_line(f"largest difference / allowed: {ratio:.3f} {test}")


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty and empty_like give NaN, so that an element nobody wrote shows."""

    def poisoning(plain):
        def empty(*args, **kwargs):
            tensor = plain(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
