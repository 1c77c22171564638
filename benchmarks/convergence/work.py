"""What a worker process does: trains the runs of a race, step by step in turn."""

import functools
import os
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from benchmarks.convergence.loop import Training, join
from benchmarks.convergence.methods import deepspeed_config
from benchmarks.convergence.runs import Job
from benchmarks.convergence.tasks import TASKS


@dataclass(frozen=True)
class Options:
    """What all races of a command share.

    Attributes:
        ends: time of the monotonic clock at which the command has ended.
        reserve: seconds before ``ends`` without which no run is begun or gone on with.
        saves: folder for checkpoints; None: a run that is cut off begins again.
    """

    out: Path
    data: str | None = None
    stage: int | None = None
    steps: int | None = None
    ends: float = float("inf")
    reserve: float = 5.0
    saves: Path | None = None
    save_every: float = 150.0

    def steps_of(self, task: str) -> int:
        return self.steps or TASKS[task].steps

    def config(self, job: Job, rate: float) -> dict[str, Any]:
        config = deepspeed_config(job.method, rate, TASKS[job.task], self.steps_of(job.task))
        if self.stage is not None:
            config["zero_optimization"] = {"stage": self.stage}
        return config


def start(counter: Any) -> None:
    """Give this process a core of its own, if there are several workers, and start DeepSpeed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if counter is not None and hasattr(os, "sched_setaffinity"):
        with counter.get_lock():
            index, counter.value = counter.value, counter.value + 1
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    join()


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


@functools.cache
def corpus_of(task: str, data: str | None) -> Any:
    return TASKS[task].corpus(data)


def settings(job: Job, options: Options) -> dict[str, Any]:
    """Return all that the runs of a method share, K-FAC's defaults included."""
    from ds_kfac.config.keys import parse

    config = options.config(job, 1.0)
    found = {
        "config at rate 1": config,
        "model": asdict(TASKS[job.task].model),
        "data": corpus_of(job.task, options.data).name,
    }
    if "kfac" in config:
        found["kfac with defaults"] = parse(config["kfac"]).model_dump(warnings=False)
    return found


def training(job: Job, options: Options) -> Training:
    task = TASKS[job.task]
    return Training(
        task,
        corpus_of(job.task, options.data),
        options.config(job, job.rate),
        seed=job.seed,
        steps=options.steps_of(job.task),
        part="test" if job.final else "validation",
        table=job.path(options.out),
        saves=options.saves / job.task / job.name if options.saves else None,
    )


def race(jobs: list[Job], options: Options) -> bool:
    """Train the runs in turn, so that what else the machine does disturbs all of them alike.

    Returns:
        Whether all of them finished in time. Those that did not are saved if ``options.saves`` says
        so.
    """
    if time.monotonic() > options.ends - options.reserve:
        return False
    trainings: list[Training] = []
    try:
        for job in jobs:
            trainings.append(training(job, options))
        longest = 0.0
        while running := [each for each in trainings if not each.finished]:
            begin = time.monotonic()
            for each in running:
                each.step()
            longest = max(longest, time.monotonic() - begin)
            saving = max(options.reserve, 2 * sum(each.save_seconds for each in running))
            out_of_time = time.monotonic() + saving + 2 * longest > options.ends
            for each in running if options.saves is not None else ():
                if out_of_time or time.monotonic() - each.saved_at > options.save_every:
                    each.save()
            if out_of_time:
                break
        return all(each.finished for each in trainings)
    finally:
        for each in trainings:
            each.close()
