"""KFACAdamW's step beside AdamW's in one process, on the CPU; and of how many operations a layer's
direction is made.

    python -m benchmarks.kernels.adam_step [--task gpt_large] [--steps 60] [--methods adamw
    kfacadamw] [--together]
        [--blocks 12] [--stage 2]

Engines of ``benchmarks/convergence`` take turns step by step, on one thread. Times are of the
process, so that other work on the machine counts little; of steps that neither update factors nor
refresh, after the burn-in. Operations are those that torch dispatches, without views and
allocations: on a GPU a launch each. --together: layers of one shape at once, as on a GPU.
"""

import argparse
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.convergence.methods import deepspeed_config
from benchmarks.convergence.run import build, corpus_of, join
from benchmarks.convergence.tasks import TASKS, Task

FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "is_set_to",
    "_local_scalar_dense",
}
"""Operations that are no launch: allocations, and what only a CPU kernel asks of a scalar."""


class Operations(TorchDispatchMode):
    """Counts what is no view and no allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        view = any(
            result.alias_info and not result.alias_info.is_write
            for result in function._schema.returns
        )
        if not view and name not in FREE:
            self.seen[name] += 1
        return function(*arguments, **(keywords or {}))


@contextmanager
def counting(owner: Any, method: str, operations: Operations) -> Iterator[None]:
    """Count what happens inside a method."""
    inner = getattr(owner, method)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        with operations:
            return inner(*arguments, **keywords)

    setattr(owner, method, counted)
    try:
        yield
    finally:
        delattr(owner, method)


def engines(
    task: Task, methods: list[str], steps: int, stage: int = 0
) -> dict[str, SimpleNamespace]:
    found = {}
    for method in methods:
        rate = {"muon": 0.02, "adamw": 1e-3}.get(method, 8e-3)
        config = deepspeed_config(method, rate, rows=task.rows, steps=steps, stage=stage)
        if "kfac" in config:
            config["kfac"] = {
                **config["kfac"],
                "burn_in": {"steps": 0},
                "eigenbasis": {"refresh_interval": 1000},
                "factor": {**config["kfac"]["factor"], "update_interval": 1000},
            }
        engine = build(task.build(0), config)
        found[method] = SimpleNamespace(engine=engine, seconds=[])
    return found


def train(engine: Any, batch: tuple) -> float:
    begin = time.process_time()
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="gpt_large")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--methods", nargs="+", default=["adamw", "kfacadamw"])
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--blocks", type=int, help="of the model, instead of the task's")
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    options = parser.parse_args()
    join()
    from ds_kfac.plan import plan as planning

    if options.together:
        planning.batched = lambda device, method: True
    task = TASKS[options.task]
    task = replace(task, model=replace(task.model, blocks=options.blocks or task.model.blocks))
    corpus = corpus_of(options.task, None)
    running = engines(task, options.methods, options.steps, options.stage)
    for step in itertools.count():
        batch = task.batch(corpus, 0, step)
        for run in running.values():
            run.seconds.append(train(run.engine, batch))
        if step == options.steps:
            break
    first = None
    for method, run in running.items():
        low, median, high = (1e3 * value for value in statistics.quantiles(run.seconds[2:], n=4))
        first = first or median
        print(
            f"{method:24} {median:8.1f} ms, quartiles {low:.1f} .. {high:.1f}, "
            f"{median / first - 1:+.0%}",
            flush=True,
        )
    for method, run in running.items():
        if getattr(run.engine, "kfac", None) is not None:
            print_operations(method, run.engine, task.batch(corpus, 0, 0))


def print_operations(method: str, engine: Any, batch: tuple) -> None:
    kfac, step = engine.kfac.preconditioner, Operations()
    parts = (
        (kfac.direction, "step"),
        (kfac.direction, "finish"),
        (kfac.direction.optimizer, "_apply"),
    )
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(counting(owner, name, step))
        train(engine, batch)
    count, layers = sum(step.seen.values()), len(kfac.owned)
    print(f"{method}: {count} operations, {count / layers:.1f} for each of {layers} layers")
    print(", ".join(f"{name} {n}" for name, n in step.seen.most_common()))


if __name__ == "__main__":
    main()
