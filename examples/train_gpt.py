"""Train a byte-level GPT with K-FAC under DeepSpeed. The optimizer, its schedule and K-FAC come from the JSON config.

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed_config configs/gpt_zero2_kfac.json

Writes runs/<name>/: metrics.csv, loss_by_step.png, loss_by_seconds.png, step_time.png, checkpoints, and what
DeepSpeed's monitor writes.
"""

import argparse
import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

import ds_kfac

sys.path.insert(0, str(Path(__file__).parent))
import text
from gpt import GPT, GPTConfig
from plots import STAGES

ADAMW_LR = 2e-3
COLUMNS = ["step", "seconds", "loss", "held_out_loss", "lr", "tokens_per_second", "step_seconds"]
COLUMNS += [f"seconds_{stage}" for stage in STAGES]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="text file or folder; default: the Python standard library's sources")
    parser.add_argument("--name", help="run folder below --out; default: the config's file name")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--blocks", type=int, default=GPTConfig.blocks)
    parser.add_argument("--heads", type=int, default=GPTConfig.heads)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="instead of the config's")
    parser.add_argument("--eval-interval", type=int, default=25)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--resume", action="store_true", help="continue from the run's last checkpoint")
    parser.add_argument(
        "--without-kfac", action="store_true", help="the config's optimizer alone, or AdamW for KFACAdamW, to compare"
    )
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args(argv)


def read_config(arguments: argparse.Namespace, folder: Path) -> dict:
    """The DeepSpeed config with this run's folder in the monitors' paths."""
    path = Path(arguments.deepspeed_config or "")
    if not path.is_file():
        raise ValueError(f"--deepspeed_config {path}: no such file")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--deepspeed_config {path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--deepspeed_config {path}: must be a JSON object, got {type(config).__name__}")
    for monitor in ("tensorboard", "csv_monitor"):
        if monitor in config:
            config[monitor] |= {"output_path": str(folder), "job_name": monitor}
    if arguments.without_kfac:
        config.pop("kfac", None)
        optimizer = config.get("optimizer", {})
        if optimizer.get("type") == "KFACAdamW":  # at its own best rate on this model
            optimizer |= {"type": "AdamW", "params": {**optimizer["params"], "lr": ADAMW_LR}}
    if arguments.lr is not None:
        config.setdefault("optimizer", {"type": "AdamW"}).setdefault("params", {})["lr"] = arguments.lr
    schedule = config.get("scheduler", {})
    if "total_num_steps" in schedule.get("params", {}):
        schedule["params"]["total_num_steps"] = arguments.steps
    return config


class Clock:
    """Seconds per part of a step; K-FAC's stages run inside DeepSpeed's parts and are taken out of them.

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


@torch.no_grad()
def evaluate(engine, corpus: text.Corpus, arguments: argparse.Namespace, rows: int) -> float:
    """Mean loss on the same held-out windows every time, over all ranks."""
    engine.eval()
    generator = torch.Generator().manual_seed(10_000 + dist.get_rank())
    total = torch.zeros((), device=engine.device)
    for _ in range(arguments.eval_batches):
        x, y = corpus.batch(generator, rows, arguments.context, held_out=True)
        total += engine(x.to(engine.device), y.to(engine.device)).float()
    engine.train()
    dist.all_reduce(total)
    return float(total) / arguments.eval_batches / dist.get_world_size()


def train_step(engine, corpus: text.Corpus, arguments: argparse.Namespace, step: int, clock: Clock) -> torch.Tensor:
    """One optimizer step; the batch depends on seed, step and rank only. Returns the mean loss over ranks."""
    generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step * 1009 + dist.get_rank())
    accumulation, rows = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    total = torch.zeros((), device=engine.device)
    for _ in range(accumulation):
        x, y = corpus.batch(generator, rows, arguments.context)
        with clock.part("forward"):
            loss = engine(x.to(engine.device), y.to(engine.device))
        with clock.part("backward"):
            engine.backward(loss)
        with clock.part("optimizer"):
            engine.step()
        total += loss.detach().float() / accumulation
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train(engine, corpus: text.Corpus, arguments: argparse.Namespace, folder: Path, first: int) -> None:
    is_main, attachment = dist.get_rank() == 0, getattr(engine, "kfac", None)
    attachment = attachment if isinstance(attachment, ds_kfac.Attachment) else None
    rows = engine.train_micro_batch_size_per_gpu()
    tokens = rows * arguments.context * engine.gradient_accumulation_steps() * dist.get_world_size()
    seconds, held_out = resume_table(folder, first) if is_main else 0.0, None
    with contextlib.ExitStack() as stack:
        options = {"disable": not is_main, "unit": "step", "mininterval": 0.2 if sys.stderr.isatty() else 5}
        bar = stack.enter_context(tqdm(total=arguments.steps, initial=first, **options))
        if is_main:
            file = stack.enter_context(open(folder / "metrics.csv", "a", newline=""))
            table = csv.DictWriter(file, COLUMNS, restval="")
            if file.tell() == 0:
                table.writeheader()
        for step in range(first, arguments.steps):
            clock = Clock(attachment.metrics.seconds if attachment else {})
            start = time.perf_counter()
            loss = float(train_step(engine, corpus, arguments, step, clock))
            elapsed = time.perf_counter() - start
            seconds += elapsed
            last = step + 1 == arguments.steps
            due = (step + 1) % arguments.eval_interval == 0 or last
            held_out = evaluate(engine, corpus, arguments, rows) if due else None
            if is_main:
                row = {"step": step + 1, "seconds": seconds, "loss": loss, "lr": engine.get_lr()[0]}
                row |= {"tokens_per_second": tokens / elapsed, "step_seconds": elapsed}
                row |= {f"seconds_{name}": value for name, value in clock.parts.items()}
                table.writerow(row | ({} if held_out is None else {"held_out_loss": held_out}))
                file.flush()
                shown = {"loss": f"{loss:.3f}", "tokens/s": f"{tokens / elapsed:.0f}", "ms": f"{1000 * elapsed:.0f}"}
                bar.set_postfix(shown, refresh=False)
                if held_out is not None:
                    bar.write(f"step {step + 1:5d}  loss {loss:.4f}  held out {held_out:.4f}  {seconds:.1f} s")
                    if engine.monitor.enabled:
                        events = [("Train/loss", loss, engine.global_samples)]
                        engine.monitor.write_events([*events, ("Train/held_out_loss", held_out, engine.global_samples)])
            bar.update()
            if arguments.save_interval and ((step + 1) % arguments.save_interval == 0 or last):
                engine.save_checkpoint(str(folder / "checkpoints"), client_state={"next_step": step + 1})


def resume_table(folder: Path, first: int) -> float:
    """Drop rows a resumed run will write again; returns the seconds trained so far."""
    path = folder / "metrics.csv"
    if first == 0 or not path.exists():
        path.unlink(missing_ok=True)
        return 0.0
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) <= first]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return float(rows[-1]["seconds"]) if rows else 0.0


def run(arguments: argparse.Namespace) -> None:
    name = arguments.name or Path(arguments.deepspeed_config or "run").stem
    folder = arguments.out / name
    config = read_config(arguments, folder)
    corpus = text.load(arguments.data, arguments.context)
    model_config = GPTConfig(arguments.width, arguments.blocks, arguments.heads, arguments.context)
    torch.manual_seed(arguments.seed)
    engine, *_ = ds_kfac.initialize(model=(model := GPT(model_config)), model_parameters=groups(model), config=config)
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    if arguments.resume and (folder / "checkpoints" / "latest").exists():
        _, state = engine.load_checkpoint(str(folder / "checkpoints"))
        first = state["next_step"]
    if dist.get_rank() == 0:
        print(f"data: {corpus.name}\nrun:  {folder}, steps {first} to {arguments.steps}", flush=True)
    train(engine, corpus, arguments, folder, first)
    if dist.get_rank() == 0 and not arguments.no_plots:
        from plots import draw

        print("\n".join(["wrote:", str(folder / "metrics.csv"), *map(str, draw([folder], folder))]), flush=True)


def groups(model: torch.nn.Module) -> list[dict]:
    """Weight decay for matrices only, as usual."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim == 2]},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if "RANK" not in os.environ:
        print(
            "error: no launcher environment (RANK is not set); start with: deepspeed --num_accelerators 2 "
            "examples/train_gpt.py --deepspeed_config configs/gpt_zero2_kfac.json",
            file=sys.stderr,
        )
        return 2
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:  # DeepSpeed would compile it in every process, and a killed build blocks all later runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if on_cpu else None)
    try:
        run(arguments)
    except ValueError as error:  # the user's input; anything else is a bug and keeps its traceback
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():
        if code == 0:
            dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads now and then abort an interpreter that shuts down after all work is done
