"""What the examples share: arguments, the run folder, the training loop with its table, checkpoints
and plots.

A run is a folder runs/<name>/: metrics.csv, plots, checkpoints, and what DeepSpeed's monitor
writes. The optimizer, its schedule and K-FAC come from the JSON config.
"""

import argparse
import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from plots import STAGES
from torch import Tensor, nn
from tqdm import tqdm

import ds_kfac


class Task(Protocol):
    """What is trained.

    Attributes:
        data: name of the data.
        unit: what a second's work is counted in, such as "tokens".
        figures: columns that :meth:`evaluate` fills.
        plain: AdamW's parameters at its own best, in place of KFACAdamW's, for ``--without-kfac``.
    """

    data: str
    unit: str
    figures: tuple[str, ...]
    plain: Mapping[str, Any]

    def loss(self, engine: Any, step: int, part: int) -> tuple[Tensor, int]:
        """Of one micro-batch, which depends on the seed, step, part and rank only; and how many
        units it has."""

    def evaluate(self, engine: Any) -> dict[str, float]:
        """On held-out data, the same every time, over all ranks; the first figure is a loss."""


def parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """Arguments of every example."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--name", help="run folder below --out; default: the config's file name")
    found.add_argument("--out", type=Path, default=Path("runs"))
    found.add_argument("--steps", type=int, default=300)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--lr", type=float, help="instead of the config's")
    found.add_argument("--rows", type=int, help="of a rank's micro-batch, instead of the config's")
    found.add_argument("--eval-interval", type=int, default=25)
    found.add_argument(
        "--save-interval", type=int, default=0, help="steps between checkpoints; 0: none"
    )
    found.add_argument(
        "--resume", action="store_true", help="continue from the run's last checkpoint"
    )
    found.add_argument(
        "--without-kfac",
        action="store_true",
        help="the config's optimizer alone, or AdamW for KFACAdamW, to compare",
    )
    found.add_argument("--no-plots", action="store_true")
    found.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    deepspeed.add_config_arguments(found)
    found.set_defaults(**defaults)
    return found


def read_config(arguments: argparse.Namespace, folder: Path, plain: Mapping[str, Any]) -> dict:
    """The DeepSpeed config with this run's folder in the monitors' paths."""
    path = Path(arguments.deepspeed_config or "")
    if not path.is_file():
        raise ValueError(f"--deepspeed_config {path}: no such file")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--deepspeed_config {path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"--deepspeed_config {path}: must be a JSON object, got {type(config).__name__}"
        )
    for monitor in ("tensorboard", "csv_monitor"):
        if monitor in config:
            config[monitor] |= {"output_path": str(folder), "job_name": monitor}
    if arguments.without_kfac:
        config.pop("kfac", None)
        optimizer = config.get("optimizer", {})
        if optimizer.get("type") == "KFACAdamW":
            optimizer |= {"type": "AdamW", "params": {**optimizer["params"], **plain}}
    if arguments.lr is not None:
        config.setdefault("optimizer", {"type": "AdamW"}).setdefault("params", {})["lr"] = (
            arguments.lr
        )
    if arguments.rows is not None:
        config["train_micro_batch_size_per_gpu"] = arguments.rows
    schedule = config.get("scheduler", {})
    if "total_num_steps" in schedule.get("params", {}):
        schedule["params"]["total_num_steps"] = arguments.steps
    return config


class Clock:
    """Seconds per part of a step; K-FAC's stages run inside DeepSpeed's parts and are taken out of
    them.

    Args:
        stages: K-FAC's seconds so far, which grow.
    """

    def __init__(self, stages: Mapping[str, float]) -> None:
        self.parts: dict[str, float] = {}
        self.stages = stages

    @contextlib.contextmanager
    def part(self, name: str):
        start, before = time.perf_counter(), dict(self.stages)
        yield
        get_accelerator().synchronize()
        inside = {stage: total - before.get(stage, 0.0) for stage, total in self.stages.items()}
        own = time.perf_counter() - start - sum(inside.values())
        for part, seconds in (inside | {name: own}).items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds


def train_step(engine, task: Task, step: int, clock: Clock) -> tuple[Tensor, int]:
    """One optimizer step: the mean loss over ranks, and the units of all of them."""
    accumulation, units = engine.gradient_accumulation_steps(), 0
    total = torch.zeros((), device=engine.device)
    for part in range(accumulation):
        with clock.part("forward"):
            loss, count = task.loss(engine, step, part)
        with clock.part("backward"):
            engine.backward(loss)
        with clock.part("optimizer"):
            engine.step()
        total += loss.detach().float() / accumulation
        units += count
    dist.all_reduce(total)
    return total / dist.get_world_size(), units * dist.get_world_size()


def train(engine, task: Task, arguments: argparse.Namespace, folder: Path, first: int) -> None:
    is_main, attachment = dist.get_rank() == 0, getattr(engine, "kfac", None)
    attachment = attachment if isinstance(attachment, ds_kfac.Attachment) else None
    speed = f"{task.unit}_per_second"
    columns = ["step", "seconds", "loss", *task.figures, "lr", speed, "step_seconds"]
    columns += [f"seconds_{stage}" for stage in STAGES]
    seconds = resume_table(folder, first, columns) if is_main else 0.0
    with contextlib.ExitStack() as stack:
        options = {
            "disable": not is_main,
            "unit": "step",
            "mininterval": 0.2 if sys.stderr.isatty() else 5,
        }
        bar = stack.enter_context(tqdm(total=arguments.steps, initial=first, **options))
        if is_main:
            file = stack.enter_context(open(folder / "metrics.csv", "a", newline=""))
            table = csv.DictWriter(file, columns, restval="")
            if file.tell() == 0:
                table.writeheader()
        for step in range(first, arguments.steps):
            if attachment:
                attachment.metrics.timings = True
            clock = Clock(attachment.metrics.seconds if attachment else {})
            start = time.perf_counter()
            mean, units = train_step(engine, task, step, clock)
            loss, elapsed = float(mean), time.perf_counter() - start
            seconds += elapsed
            last = step + 1 == arguments.steps
            due = (step + 1) % arguments.eval_interval == 0 or last
            found = task.evaluate(engine) if due else {}
            if is_main:
                row = {
                    "step": step + 1,
                    "seconds": seconds,
                    "loss": loss,
                    "lr": engine.get_lr()[0],
                    **found,
                }
                row |= {speed: units / elapsed, "step_seconds": elapsed}
                row |= {f"seconds_{name}": value for name, value in clock.parts.items()}
                table.writerow(row)
                file.flush()
                rate = {f"{task.unit}/s": f"{units / elapsed:.0f}", "ms": f"{1000 * elapsed:.0f}"}
                bar.set_postfix({"loss": f"{loss:.3f}", **rate}, refresh=False)
                if found:
                    shown = "  ".join(
                        f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items()
                    )
                    bar.write(f"step {step + 1:5d}  loss {loss:.4f}  {shown}  {seconds:.1f} s")
                    if engine.monitor.enabled:
                        events = {"loss": loss, **found}.items()
                        engine.monitor.write_events(
                            [(f"Train/{n}", v, engine.global_samples) for n, v in events]
                        )
            bar.update()
            if arguments.save_interval and ((step + 1) % arguments.save_interval == 0 or last):
                synchronize_buffers(engine.module)
                engine.save_checkpoint(
                    str(folder / "checkpoints"), client_state={"next_step": step + 1}
                )


@torch.no_grad()
def synchronize_buffers(module: nn.Module) -> None:
    """Average BatchNorm's running statistics over the ranks, each of which has seen other images.
    DeepSpeed never does, and saves those of rank 0."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def resume_table(folder: Path, first: int, columns: list[str]) -> float:
    """Drop rows a resumed run will write again; returns the seconds trained so far."""
    path = folder / "metrics.csv"
    if first == 0 or not path.exists():
        path.unlink(missing_ok=True)
        return 0.0
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) <= first]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
    return float(rows[-1]["seconds"]) if rows else 0.0


def run(
    arguments: argparse.Namespace, make: Callable[[argparse.Namespace], tuple[Task, nn.Module]]
) -> None:
    name = arguments.name or Path(arguments.deepspeed_config or "run").stem
    folder = arguments.out / name
    torch.manual_seed(arguments.seed)
    task, model = make(arguments)
    config = read_config(arguments, folder, task.plain)
    engine, *_ = ds_kfac.initialize(model=model, model_parameters=groups(model), config=config)
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    if arguments.resume and (folder / "checkpoints" / "latest").exists():
        _, state = engine.load_checkpoint(str(folder / "checkpoints"))
        first = state["next_step"]
    if dist.get_rank() == 0:
        print(f"data: {task.data}\nrun:  {folder}, steps {first} to {arguments.steps}", flush=True)
    train(engine, task, arguments, folder, first)
    if dist.get_rank() == 0 and not arguments.no_plots:
        from plots import draw

        print(
            "\n".join(["wrote:", str(folder / "metrics.csv"), *map(str, draw([folder], folder))]),
            flush=True,
        )


def groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices and filters only, as usual."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2]},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def main(script: str, config: str, arguments: argparse.Namespace, make: Any) -> int:
    """Run it under the launcher; returns the exit code."""
    if "RANK" not in os.environ:
        print(
            "error: no launcher environment (RANK is not set); start with: deepspeed "
            f"--num_accelerators 2 examples/{script} --deepspeed_config configs/{config}",
            file=sys.stderr,
        )
        return 2
    on_cpu = get_accelerator().device_name() == "cpu"
    # DeepSpeed would compile it in every process, and a killed build blocks all later runs
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if on_cpu else None)
    try:
        run(arguments, make)
    except ValueError as error:  # the user's input; anything else is a bug and keeps its traceback
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def leave(code: int) -> None:
    """End the process."""
    if dist.is_initialized():
        if code == 0:
            dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads now and then abort an interpreter that shuts down after all work is done
    os._exit(code)
