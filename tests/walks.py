"""How many functions and files of ds_kfac a training step runs through.

A walk is what one engine of two runs, with ZeRO-2 and KFACAdamW. ``python -m tests.walks`` prints
the table. ``make report`` compares it with the last one.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ds_kfac
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, train
from tests.ranks import run_ranks

HOME = f"{Path(ds_kfac.__file__).parent}/"
REFRESH, CAPTURE = 8, 4
KFAC = {
    "factor": {"update_interval": CAPTURE, "decay": 0.9},
    "eigenbasis": {"refresh_interval": REFRESH},
    "burn_in": {"steps": 0},
    "report": "none",
}
Function = tuple[str, str]
"""A file, and a function in it."""


@contextmanager
def walked() -> Iterator[set[Function]]:
    """Collect the functions of ds_kfac that are called; comprehensions belong to theirs."""
    functions: set[Function] = set()

    def note(frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(HOME)
        if is_ours and not code.co_name.endswith(("comp>", "genexpr>")):
            functions.add((code.co_filename.removeprefix(HOME), code.co_qualname))

    sys.setprofile(note)
    try:
        yield functions
    finally:
        sys.setprofile(None)


def worker(folder: str) -> dict[str, tuple[int, int]]:
    walks: dict[str, set[Function]] = {}
    engine = build(BY_NAME["adam-z2"], 1, kfac=KFAC)
    engine.kfac.detach()
    with walked() as walks["attach"]:
        ds_kfac.attach(engine, KFAC)
    # captured steps 1 and 3 prove, and begin a run
    train(engine, 1, steps=2 * REFRESH)
    # step number, counted from a refresh
    names = {0: "refreshing step", 1: "plain step", CAPTURE: "capturing step"}
    for index in range(CAPTURE + 1):
        x, y = next(iter(micro_batches(2 * REFRESH + index, 1)))
        with walked() as functions:
            engine.backward(engine(x, y))
            engine.step()
        if index in names:
            walks[names[index]] = functions
    with walked() as walks["save"]:
        engine.save_checkpoint(folder, tag="tag")
    with walked() as walks["load"]:
        engine.load_checkpoint(folder, tag="tag")
    return {name: (len(own), len({file for file, _ in own})) for name, own in walks.items()}


def measure(folder: str) -> dict[str, tuple[int, int]]:
    """Map each walk to its numbers of functions and files.

    Args:
        folder: an empty folder for a checkpoint.
    """
    return run_ranks("tests.walks:worker", world=2, payload=folder)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = measure(folder)
    print(f"{'':22}{'functions':>10}{'files':>7}")
    for name, (functions, files) in result.items():
        print(f"{name:22}{functions:10}{files:7}")
