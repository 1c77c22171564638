"""What optimizers cost in a training step of a GPT-2-small on one device: AdamW, Muon, KFACAdamW,
K-FAC into AdamW.

    python benchmarks/step_gpu.py [--methods AdamW KFACAdamW] [--kfac '{"preconditioner": {...}}']
    [--out FOLDER]
    python benchmarks/step_gpu.py --smoke      # two steps of each K-FAC method in every ZeRO stage

One method after the other, each with its own engine, at the default intervals: medians of each kind
of step, the mean of whole refresh intervals, what that is more than AdamW's step, and the memory
peak. A step is over when its own stream is done: a decomposition on another one may go on beside
the next steps. A second, slower run waits for the device around every stage, which gives the
stages' shares; a third is recorded by torch.profiler. Every row is in the csv file when it is
measured, and what fails is a row. Without a GPU: DS_ACCELERATOR=cpu and a small model, to see that
it works.
"""

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# torch reads it when it is imported
if __name__ == "__main__" and os.environ.get("DS_ACCELERATOR") == "cpu":
    # Muon's kernels: minutes, and no faster on a CPU
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ds_kfac
from benchmarks.engines import freed
from benchmarks.kernels.report import CsvFile
from benchmarks.mean_step import REFRESH, ROW, UPDATE, WEIGHTS
from ds_kfac.metrics import STAGES
from ds_kfac.plan import plan as planning
from ds_kfac.update import rotation
from examples.gpt import Block, GPTConfig

FIRST = UPDATE + 1
"""Step that is timed: those before it allocate and compile."""
TARGET = 0.15
LONG_REFRESH = planning.LONG_REFRESH
ADAM = {"betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True}
METHODS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 3e-4, **ADAM}},
    "Muon": {
        "type": "Muon",
        "params": {"muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.95, **ADAM},
    },
    "KFACAdamW": {"type": "KFACAdamW", "params": {"lr": 3e-4, **ADAM}},
    "K-FAC into AdamW": {"type": "AdamW", "params": {"lr": 3e-4, **ADAM}},
}
"""Optimizer blocks; those with K-FAC have its name in theirs."""
COLUMNS = (
    "method",
    "stage",
    "what",
    "median_ms",
    "low_ms",
    "high_ms",
    "of_adamw",
    "count",
    "memory_mb",
    "problem",
)
SMOKE_STEPS = 2


class GPT2(nn.Module):
    """Tokens [B, T] -> their mean cross-entropy; the head is the embedding. 124 M parameters as
    GPT-2 small."""

    def __init__(self, config: GPTConfig, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, config.width)
        self.embed_positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.embed_tokens(x) + self.embed_positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.embed_tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def has_kfac(method: str) -> bool:
    return "K-FAC" in method or "KFAC" in method


def first_of(method: str) -> int:
    """The first step that is timed. A factor's first refresh is by eigh, as is every tenth one from
    then on."""
    return REFRESH + FIRST if has_kfac(method) else FIRST


def config_of(options: argparse.Namespace, method: str, *, stage: int) -> dict[str, Any]:
    """Of an engine; sets how its plan spreads refreshes, too."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_accumulation_steps": options.accumulation,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": METHODS[method],
        "steps_per_print": 1000000,
    }
    if has_kfac(method):
        # else each kind of work in a step of its own
        planning.LONG_REFRESH = LONG_REFRESH if options.staggered else math.inf
        rotation.BATCHED = options.batched or rotation.BATCHED
        blocks: dict[str, Any] = {"burn_in": {"steps": 0}}
        for name, values in json.loads(options.kfac).items():
            blocks[name] = (
                {**blocks.get(name, {}), **values} if isinstance(values, dict) else values
            )
        config["kfac"] = blocks
    return config


def build(options: argparse.Namespace, method: str, *, stage: int, timings: bool = False) -> Any:
    torch.manual_seed(0)
    config = config_of(options, method, stage=stage)
    model = GPT2(
        GPTConfig(options.width, options.blocks, options.heads, options.context), options.vocabulary
    )
    start = ds_kfac.initialize if has_kfac(method) else deepspeed.initialize
    with contextlib.redirect_stdout(io.StringIO()):
        engine = start(model=model, model_parameters=model.parameters(), config=config)[0]
    if has_kfac(method):
        engine.kfac.metrics.timings = timings
    if has_kfac(method) and not timings:
        print(engine.kfac.report, flush=True)
    return engine


def step(engine: Any, options: argparse.Namespace, index: int) -> float:
    """Seconds of forward, backward and step, until their stream is done."""
    generator = torch.Generator().manual_seed(index)
    shape = options.accumulation, options.rows, options.context
    batches = torch.randint(options.vocabulary, shape, generator=generator).to(engine.device)
    stream = get_accelerator().current_stream()
    wait = stream.synchronize if stream is not None else lambda: None
    wait()
    start = time.perf_counter()
    for x in batches:
        engine.backward(engine(x, x.roll(-1, 1)))
        engine.step()
    wait()
    return time.perf_counter() - start


def kind(engine: Any) -> str:
    """Of the coming step."""
    if not isinstance(getattr(engine, "kfac", None), ds_kfac.Attachment):
        return "step"
    due = engine.kfac.preconditioner.due
    return "refresh" if due.refresh else "factor update" if due.capture else "preconditioning only"


def engine_of(options: argparse.Namespace, method: str, **how: Any):
    return freed(lambda: build(options, method, **how))


def measure(options: argparse.Namespace, method: str) -> tuple[list[tuple[str, float]], float]:
    """(kind, seconds) of each step after those that allocate and compile; and the peak of memory in
    MB."""
    times = []
    get_accelerator().reset_peak_memory_stats()
    with engine_of(options, method, stage=options.stage) as engine:
        first = first_of(method)
        for index in range(first + (options.periods if has_kfac(method) else 1) * REFRESH):
            name = kind(engine)
            seconds = step(engine, options, index)
            if index >= first:
                times.append((name, seconds))
    return times, get_accelerator().max_memory_allocated() / 1e6


def stages(options: argparse.Namespace, method: str) -> dict[str, tuple[float, float]]:
    """Stage -> (seconds of one, part of the steps that have it); each waited for, so their sum is
    more than a step."""
    spent: dict[str, dict[str, list[float]]] = {name: {} for name in STAGES}
    with engine_of(options, method, stage=options.stage, timings=True) as engine:
        metrics = engine.kfac.preconditioner.metrics
        for index in range(2 * REFRESH + UPDATE + 1):
            name, before = kind(engine), dict(metrics.seconds)
            step(engine, options, index)
            if index > REFRESH:
                for stage in STAGES:
                    spent[stage].setdefault(name, []).append(
                        metrics.seconds[stage] - before.get(stage, 0.0)
                    )
    found = {}
    for stage, by_kind in spent.items():
        medians = {name: statistics.median(values) for name, values in by_kind.items()}
        found[stage] = (
            max(medians.values()),
            sum(WEIGHTS[name] * medians.get(name, 0.0) for name in WEIGHTS),
        )
    return found


def trace(options: argparse.Namespace, method: str) -> None:
    """A trace of each kind of step and a table of what took longest, in the output folder."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if options.gpu else [])]
    seen, first = set(), first_of(method)
    with engine_of(options, method, stage=options.stage) as engine:
        for index in range(first + UPDATE + 2):
            name = kind(engine)
            if index < first or name in seen:
                step(engine, options, index)
                continue
            seen.add(name)
            with profile(activities=activities) as recorded:
                step(engine, options, index)
            stem = f"trace_{method}_{name}".replace(" ", "_")
            recorded.export_chrome_trace(str(options.out / f"{stem}.json.gz"))
            by = "self_cuda_time_total" if options.gpu else "self_cpu_time_total"
            (options.out / f"{stem}.txt").write_text(
                recorded.key_averages().table(sort_by=by, row_limit=40)
            )


def rows_of(
    options: argparse.Namespace, method: str, base: float | None, add: Callable[..., None]
) -> float:
    """Adds the rows of a method; returns the seconds of its mean step. ``base``: AdamW's."""
    times, memory = measure(options, method)
    by_kind: dict[str, list[float]] = {}
    for name, seconds in times:
        by_kind.setdefault(name, []).append(seconds)
    for name, values in by_kind.items():
        low, middle, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
        add(
            what=name,
            median_ms=1e3 * middle,
            low_ms=1e3 * low,
            high_ms=1e3 * high,
            of_adamw=middle / base if base else "",
            count=len(values),
            memory_mb=memory,
        )
    if not has_kfac(method):
        return statistics.median(by_kind["step"])
    mean = statistics.fmean(seconds for _, seconds in times)
    add(what=ROW, median_ms=1e3 * mean, of_adamw=mean / base if base else "", count=len(times))
    if base:
        verdict = "below" if mean / base < 1 + TARGET else "not below"
        print(
            f"{method}: overhead {mean / base - 1:.1%} of AdamW's step, {verdict} {TARGET:.0%}",
            flush=True,
        )
    for stage, (most, weighed) in stages(options, method).items():
        add(what=f"stage {stage}, most in a step", median_ms=1e3 * most)
        add(
            what=f"stage {stage}, weighed",
            median_ms=1e3 * weighed,
            of_adamw=weighed / base if base else "",
        )
    return mean


def smoke(options: argparse.Namespace, method: str, stage: int, add: Callable[..., None]) -> None:
    with engine_of(options, method, stage=stage) as engine:
        for index in range(SMOKE_STEPS):
            add(what=f"step {index}", median_ms=1e3 * step(engine, options, index))
        if not all(parameter.isfinite().all() for parameter in engine.module.parameters()):
            raise ValueError("weights are not finite")


def run(options: argparse.Namespace) -> int:
    """Number of methods, or of stages of a method, that failed."""
    name = f"{'smoke' if options.smoke else 'step'}_{get_accelerator().device_name()}_{options.blocks}x{options.width}"
    file, failed, base = CsvFile(options.out / f"{name}.csv", COLUMNS), 0, None
    print(about(options), flush=True)
    for method in options.methods:
        for stage in (0, 1, 2, 3) if options.smoke else (options.stage,):

            def add(method=method, stage=stage, **row: Any) -> None:
                file.add([{"method": method, "stage": stage, **row}])
                print(
                    method,
                    f"stage {stage}",
                    *(f"{key} {value}" for key, value in row.items()),
                    flush=True,
                )

            try:
                if options.smoke:
                    smoke(options, method, stage, add)
                    continue
                seconds = rows_of(options, method, base, add)
                base = seconds if method == "AdamW" else base
                if options.trace:
                    trace(options, method)
            except Exception as problem:
                failed += 1
                add(what="failed", problem=f"{type(problem).__name__}: {problem}".splitlines()[0])
    return failed


def about(options: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if options.gpu else "CPU"
    return (
        f"Step on {device}, {options.blocks} x {options.width}, {options.rows} x "
        f"{options.context} tokens, bf16, "
        f"ZeRO {options.stage}, torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    )


def start() -> bool:
    """DeepSpeed in this process; whether on a GPU."""
    gpu = get_accelerator().device_name() == "cuda"
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    for name, value in place.items():
        os.environ.setdefault(name, value)
    if not gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("nccl" if gpu else "gloo")
    return gpu


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "width": 768,
        "blocks": 12,
        "heads": 12,
        "context": 1024,
        "vocabulary": 50304,
        "rows": 32,
        "stage": 1,
        "accumulation": 1,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--periods", type=int, default=2, help=f"that are timed, of {REFRESH} steps"
    )
    parser.add_argument(
        "--staggered", action="store_true", help="refreshes spread over steps, as in a run"
    )
    parser.add_argument(
        "--batched", type=int, help="elements of the layers that are stepped in one batch"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--kfac", default="{}", help="JSON: settings of the kfac block, over those of this run"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="two steps of each K-FAC method in every ZeRO stage"
    )
    parser.add_argument("--trace", action="store_true", help="record steps by torch.profiler, too")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    options = parser.parse_args(arguments)
    options.methods = [
        method for method in options.methods if has_kfac(method) or not options.smoke
    ]
    options.gpu = start()
    return 1 if run(options) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads now and then abort at exit
