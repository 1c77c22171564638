"""How many functions and files of ds_kfac a training step runs through.

A walk is what one engine of two runs, with ZeRO-2 and KFACAdamW. ``python -m tests.walks`` prints
the table; ``-v`` adds the files of each walk. ``make report`` compares it with the last one.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

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


class Walk:
    """Functions of ds_kfac that are called, by file; comprehensions belong to theirs."""

    def __init__(self, inside: frozenset[str] = frozenset(), tensors: bool = False) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.deepest = self.depth = 0
        self._inside, self._open, self._tensors = inside, 0, tensors

    def __call__(self, frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        if (
            event not in ("call", "return")
            or not code.co_filename.startswith(HOME)
            or code.co_name.endswith("comp>")
        ):
            return
        if code.co_name == "<genexpr>":
            return
        step = 1 if event == "call" else -1
        self.depth += step
        self.deepest = max(self.deepest, self.depth)
        if code.co_qualname in self._inside:
            self._open += step
        if (
            self._inside
            and not self._open
            and not (event == "return" and code.co_qualname in self._inside)
        ):
            return
        if self._tensors and not (
            holds_tensor(value) or (event == "call" and holds_tensor(list(frame.f_locals.values())))
        ):
            return
        self.functions.add((code.co_filename.removeprefix(HOME), code.co_qualname))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


def holds_tensor(value: Any, depth: int = 2) -> bool:
    """Whether it is a tensor or a container with one."""
    if isinstance(value, torch.Tensor):
        return True
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return depth > 0 and any(holds_tensor(part, depth - 1) for part in parts)


@contextmanager
def walked(*walks: Walk) -> Iterator[None]:
    def both(frame: Any, event: str, value: Any) -> None:
        for walk in walks:
            walk(frame, event, value)

    sys.setprofile(both)
    try:
        yield
    finally:
        sys.setprofile(None)


def worker(folder: str) -> dict[str, tuple[int, list[str], int]]:
    walks: dict[str, Walk] = {}

    def walk(name: str, work: Callable[[], Any]) -> None:
        walks[name] = Walk()
        with walked(walks[name]):
            work()

    mode = BY_NAME["adam-z2"]
    engine = build(mode, 1, kfac=KFAC)
    engine.kfac.detach()
    walk("attach", lambda: ds_kfac.attach(engine, KFAC))
    train(engine, 1, steps=2 * REFRESH)  # captured steps 1 and 3 prove, and begin a run
    by_use = frozenset({"Reducer.reduce", "FactorUpdates.update"})
    activation, in_step = Walk(), Walk(by_use)

    def step(index: int, *forward: Walk, **taken: Walk) -> None:
        x, y = next(iter(micro_batches(index, 1)))
        with walked(*forward):
            loss = engine(x, y)
            engine.backward(loss)
        with walked(*taken.values()):
            engine.step()
        walks.update({name.replace("_", " "): own for name, own in taken.items()})

    step(
        2 * REFRESH,
        activation,
        with_a_refresh=Walk(),
        in_step=in_step,
        refresh=Walk(frozenset({"FactorUpdates.decompose"})),
    )
    activation.functions |= walks.pop("in step").functions
    walks["activation to factor"] = activation
    step(2 * REFRESH + 1)
    step(2 * REFRESH + 2, plain_step=Walk(), gradient_to_weight=Walk(tensors=True))
    step(2 * REFRESH + 3)
    step(2 * REFRESH + CAPTURE, capturing_step=Walk())
    walk("save", lambda: engine.save_checkpoint(folder, tag="tag"))
    walk("load", lambda: engine.load_checkpoint(folder, tag="tag"))
    return {
        name: (len(own.functions), sorted(own.files), own.deepest) for name, own in walks.items()
    }


def measure(folder: str) -> dict[str, tuple[int, list[str], int]]:
    """Map each walk to its number of functions, its files and its deepest stack.

    Args:
        folder: an empty folder for a checkpoint.
    """
    return run_ranks("tests.walks:worker", world=2, payload=folder)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = measure(folder)
    print(f"{'':22}{'functions':>10}{'files':>7}{'stack':>7}")
    for name, (functions, files, deepest) in result.items():
        print(f"{name:22}{functions:10}{len(files):7}{deepest:7}")
        if "-v" in sys.argv:
            print(*files, sep="\n  ")
