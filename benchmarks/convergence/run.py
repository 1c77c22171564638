"""A worker of the convergence benchmark: one process, one core, one thread, a new engine for every
run."""

import contextlib
import functools
import gc
import io
import itertools
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import parent_process
from pathlib import Path

import torch

from benchmarks.convergence.methods import CLIENT, RAMP, TABLE_RATE, deepspeed_config
from benchmarks.convergence.results import (
    COLUMNS,
    REWARD_COLUMNS,
    Job,
    Run,
    is_diverged,
    read,
    write,
)
from benchmarks.convergence.reward_tasks import RewardTask
from benchmarks.convergence.tasks import TASKS

EVALUATION_INTERVAL, EVALUATIONS = 10, 60
"""At least so many steps between evaluations; at most so many evaluations."""
ENVIRONMENT = {
    # Muon compiles its kernels: two minutes in the first step, and no faster on a CPU
    "TORCH_COMPILE_DISABLE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
}


def start(counter) -> None:
    """Pin this process to a core of its own and start DeepSpeed in it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    join()


def join() -> None:
    """Start DeepSpeed in this process: a job of one rank and one thread."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # here, so that it sees this environment, and the parent need not wait for it
    from deepspeed.accelerator import get_accelerator

    deepspeed.utils.logger.setLevel("ERROR")
    backend = (
        "gloo"
        if get_accelerator().device_name() == "cpu"
        else get_accelerator().communication_backend_name()
    )
    if backend == "gloo":  # DeepSpeed would compile it, and a killed build blocks all later runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed(backend)


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def race(jobs: list[Job], out: Path, steps: int, stage: int, data: str | None) -> list[Run]:
    """Train step by step in turn, so that whatever else this machine does hits all alike; write the
    csvs, return them.

    A single job is an ordinary run.
    """
    engines, rows = [], {job: [] for job in jobs}
    try:
        running = {}
        for job in jobs:
            task = TASKS[job.task]
            corpus = corpus_of(job.task, data)
            config = deepspeed_config(
                job.method, job.rate, rows=task.rows, steps=steps, stage=stage
            )
            engine = build(task.build(job.seed), config)
            engines.append(engine)
            if RAMP in config:
                import ds_kfac

                at = [round(part * steps) * task.rows for part in config[RAMP]]
                ds_kfac.BatchRamp(engine, largest=2 ** len(at) * task.rows, at=at)
            part = "test" if job.final else "validation"
            if isinstance(task, RewardTask):  # what it learns from depends on what it has learned
                running[job] = task.train(engine, job.seed, part, steps, evaluation_interval(steps))
                continue
            batches = (task.batch(corpus, job.seed, step) for step in itertools.count())
            running[job] = train(engine, batches, task.held_out(corpus, part), steps)
        while running:
            for job in list(running):
                row = next(running[job], None)
                if row is None:
                    del running[job]
                else:
                    rows[job].append(row)
    finally:
        for engine in engines:
            engine.destroy()
        engines.clear()
        gc.collect()
    for job in jobs:
        columns = REWARD_COLUMNS if isinstance(TASKS[job.task], RewardTask) else COLUMNS
        write(job.path(out), rows[job], columns)
    return [read(job, out) for job in jobs]


@functools.cache
def corpus_of(task: str, data: str | None):
    return TASKS[task].corpus(data)


def settings(task: str, method: str, steps: int, stage: int, data: str | None) -> dict:
    """All that runs of a method share, K-FAC's defaults included."""
    from ds_kfac.config.keys import parse

    model, rows = TASKS[task].model, TASKS[task].rows
    config = deepspeed_config(method, 1.0, rows=rows, steps=steps, stage=stage)
    found = {"config at rate 1": config, "model": asdict(model), "data": corpus_of(task, data).name}
    if "kfac" in config:
        # values are ready-made
        found["kfac with defaults"] = parse(config["kfac"]).model_dump(warnings=False)
    return found


def build(model, config: dict):
    """An engine, silently; matrices and filters decay, the rest does not."""
    import ds_kfac

    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]},
        {
            "params": [p for p in model.parameters() if p.ndim < 2 and p.requires_grad],
            "weight_decay": 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if TABLE_RATE in config:
        table, rate = (
            model.embed_bytes.weight,
            config["optimizer"]["params"]["lr"] * config[TABLE_RATE],
        )
        groups[0]["params"] = [p for p in groups[0]["params"] if p is not table]
        groups.append({"params": [table], "lr": rate})
    arguments = {
        "config": {
            key: value for key, value in config.items() if key not in (CLIENT, TABLE_RATE, RAMP)
        }
    }
    if CLIENT in config:
        import pytorch_optimizer

        kind, params = config[CLIENT]
        if kind == "Muon":
            groups = muon_groups(model, params)
        arguments |= {"optimizer": getattr(pytorch_optimizer, kind)(groups, **params)}
    else:
        arguments |= {"model_parameters": groups}
    with contextlib.redirect_stdout(io.StringIO()):
        return ds_kfac.initialize(model=model, **arguments)[0]


def muon_groups(model, params: dict) -> list[dict]:
    """Hidden matrices and filters; and for Adam, at a rate of its own, all vectors, heads and what
    sees the inputs."""
    named = {p: name for name, p in model.named_parameters()}
    matrices = [p for p in named if p.ndim >= 2]
    hidden = [p for p in matrices[1:-1] if "embed" not in named[p]]
    others = [p for p in named if not any(p is other for other in hidden)]
    return [
        {"params": hidden, "use_muon": True},
        {"params": others, "use_muon": False, "lr": params["adamw_lr"]},
    ]


def train(engine, batches: Iterator[tuple], held_out: list[tuple], steps: int) -> Iterator[dict]:
    """A row for every step, up to the one whose loss says that the run diverged. ``steps``: batches
    in all, of which a ramp takes several a step; a step's loss is that of its last one then."""
    from deepspeed.accelerator import get_accelerator

    seconds, first, step, evaluated, elapsed = 0.0, None, 0, 0, 0.0
    interval = evaluation_interval(steps)
    for batch in range(1, steps + 1):
        x, y = next(batches)
        begin = time.perf_counter()
        loss = engine(x.to(engine.device), y.to(engine.device))
        value = float(loss.detach())
        first = value if first is None else first
        diverged = is_diverged(value, first)
        if not diverged:
            engine.backward(loss)
            engine.step()
            get_accelerator().synchronize()
        elapsed += time.perf_counter() - begin
        if not diverged and engine.global_steps == step and batch < steps:
            continue
        step += 1
        seconds += elapsed
        row = {"step": step, "seconds": seconds, "loss": value, "step_seconds": elapsed}
        elapsed = 0.0
        if not diverged and (batch // interval > evaluated or batch == steps):
            evaluated = batch // interval
            row |= evaluate(engine, held_out)
        yield row
        if diverged:
            return


def evaluation_interval(steps: int) -> int:
    return max(EVALUATION_INTERVAL, steps // EVALUATIONS)


def evaluate(engine, held_out: list[tuple]) -> dict[str, float]:
    engine.eval()
    accuracies = []
    with torch.no_grad():
        losses = []
        for x, y in held_out:
            losses.append(float(engine(x.to(engine.device), y.to(engine.device))))
            accuracies += [a for a in [getattr(engine.module, "accuracy", None)] if a is not None]
    engine.train()
    found = {"held_out_loss": sum(losses) / len(losses)}
    return found | ({"held_out_accuracy": sum(accuracies) / len(accuracies)} if accuracies else {})
