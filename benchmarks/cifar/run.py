"""A run of the CIFAR-10 benchmark: it saves itself when its time is over, and goes on from
there."""

import contextlib
import csv
import io
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn import functional as F

import ds_kfac
from benchmarks.cifar.jobs import COLUMNS, Job, Runs, deepspeed_config, read
from benchmarks.convergence.results import is_diverged
from benchmarks.engines import freed
from examples import networks
from examples.images import Images

VALIDATION = 5
"""Every so manieth held-out image chooses rates; the others are the test."""
SAVE_SECONDS = 60.0
"""Most that a kill costs."""
WARMUP = 3
"""Steps of an engine that is thrown away: what compiles and allocates once is no part of a method's
seconds."""


@dataclass(frozen=True)
class Task:
    """What all runs of a folder share."""

    model: str
    batch: int
    epochs: float
    evaluations: int
    images: Images
    rows: int
    """Of an evaluation's batch."""

    def steps(self, job: Job) -> int:
        return max(1, round(self.epochs * job.part * len(self.images.train) / self.batch))


def start() -> None:
    """DeepSpeed in this process: a job of one rank."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ.update(place)
    deepspeed.utils.logger.setLevel("ERROR")
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:  # DeepSpeed would compile it, and a killed build blocks all later runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if on_cpu else get_accelerator().communication_backend_name()
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed(backend)
    torch.backends.cuda.matmul.allow_tf32 = True  # as cudnn's convolutions are by default


def engine_of(task: Task, job: Job) -> Any:
    torch.manual_seed(job.seed)
    data = task.images
    size = int(data.held_out.pixels.shape[-1])  # type: ignore[union-attr]
    model = networks.build(task.model, channels=data.channels, classes=data.classes, size=size)
    named = list(model.parameters())
    groups = [
        {"params": [p for p in named if p.ndim >= 2]},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    config = deepspeed_config(job.method, job.rate, batch=task.batch, steps=task.steps(job))
    with contextlib.redirect_stdout(io.StringIO()):
        return ds_kfac.initialize(model=model, model_parameters=groups, config=config)[0]


def step(engine: Any, task: Task, job: Job, index: int) -> torch.Tensor:
    """The loss, on the device."""
    x, y = task.images.draw(job.seed, index * task.batch, task.batch)
    loss = F.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def warm_up(task: Task, job: Job) -> None:
    with freed(lambda: engine_of(task, job)) as engine:
        for index in range(WARMUP):
            step(engine, task, job, index)
        get_accelerator().synchronize()


@torch.no_grad()
def evaluate(engine: Any, task: Task) -> dict[str, float]:
    """Loss and accuracy of both held-out parts."""
    engine.eval()
    losses, right = [], []
    for x, y in task.images.batches(task.rows, 0, 1):
        logits = engine(x)
        losses.append(F.cross_entropy(logits, y, reduction="none"))
        right.append(logits.argmax(1) == y)
    engine.train()
    loss, accuracy = torch.cat(losses), torch.cat(right).float()
    validates = torch.arange(len(loss), device=loss.device) % VALIDATION == 0
    parts = {"validation": validates, "test": ~validates}
    found = {f"{name}_loss": float(loss[part].mean()) for name, part in parts.items()}
    return found | {
        f"{name}_accuracy": float(accuracy[part].mean()) for name, part in parts.items()
    }


def train(task: Task, job: Job, runs: Runs, ends: float) -> bool:
    """Whether it ended; else it was saved at ``ends``, a time of the monotonic clock."""
    steps = task.steps(job)
    interval = max(1, round(steps / max(1, round(task.evaluations * job.part))))
    get_accelerator().reset_peak_memory_stats()
    with freed(lambda: engine_of(task, job)) as engine:
        state = _resumed(engine, runs, job)
        index, seconds, first, losses = (
            state["step"],
            state["seconds"],
            state["first"],
            state["losses"],
        )
        synchronize, last_save = get_accelerator().synchronize, time.monotonic()
        synchronize()
        begin = time.perf_counter()
        while index < steps:
            losses.append(step(engine, task, job, index))
            index += 1
            over = time.monotonic() > ends
            due = index % interval == 0 or index == steps
            if not (due or over):
                continue
            synchronize()
            seconds += time.perf_counter() - begin
            losses = [float(loss) for loss in losses]
            loss = sum(losses) / len(losses)
            first = first or losses[0]
            diverged = is_diverged(loss, first)
            if due:
                row = {
                    "step": index,
                    "epoch": index * task.batch / len(task.images.train),
                    "seconds": seconds,
                    "loss": loss,
                    "memory_mb": get_accelerator().max_memory_allocated() / 1e6,
                }
                _append(runs.partial(job), row if diverged else row | evaluate(engine, task))
                losses = []
            if diverged or index == steps:
                break
            if over or time.monotonic() > last_save + SAVE_SECONDS:
                _save(
                    engine,
                    runs,
                    job,
                    {"step": index, "seconds": seconds, "first": first, "losses": losses},
                )
                last_save = time.monotonic()
            if over:
                return False
            synchronize()
            begin = time.perf_counter()
    runs.partial(job).rename(runs.path(job))
    shutil.rmtree(runs.saved(job), ignore_errors=True)
    return True


def _save(engine: Any, runs: Runs, job: Job, state: Mapping[str, Any]) -> None:
    """The new save is complete before the last one goes."""
    folder = runs.saved(job)
    with contextlib.redirect_stdout(io.StringIO()):
        engine.save_checkpoint(str(folder), client_state=dict(state))
    for other in folder.glob("global_step*"):
        if other.name != f"global_step{state['step']}":
            shutil.rmtree(other)


def _resumed(engine: Any, runs: Runs, job: Job) -> Mapping[str, Any]:
    """What was saved of a run; rows after its last save are dropped."""
    path, state = runs.partial(job), {"step": 0, "seconds": 0.0, "first": None, "losses": []}
    if (runs.saved(job) / "latest").exists():
        _, state = engine.load_checkpoint(str(runs.saved(job)))
    rows = [row for row in (read(path) if path.exists() else []) if row["step"] <= state["step"]]
    path.unlink(missing_ok=True)
    for row in rows:
        _append(path, row)
    return state


def _append(path: Path, row: Mapping[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="")
        if file.tell() == 0:
            table.writeheader()
        table.writerow({key: f"{value:.6g}" for key, value in row.items() if value == value})
