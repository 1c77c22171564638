"""What K-FAC adds to a training step of a GPT-2-small on one device: AdamW's step and K-FAC's, side by side.

    python benchmarks/step_gpu.py [--rows 32] [--kfac '{"preconditioner": {...}}'] [--out benchmarks/results]

Engines with and without K-FAC take turns, so that noise hits both; each kind of step has its median, and the overhead
is that of a mean step at the default intervals. A second, slower run waits for the device around
every stage, which gives the stages' shares. Without a GPU: DS_ACCELERATOR=cpu and a small model, to see that it works.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ds_kfac
from benchmarks.mean_step import ROW, WEIGHTS
from ds_kfac.metrics import STAGES
from examples.gpt import Block, GPTConfig

UPDATE, REFRESH = 5, 20
"""In this run; refreshes are rare otherwise."""
TARGET = 0.15


class GPT2(nn.Module):
    """Tokens [B, T] -> their mean cross-entropy; the head is the embedding. 124 M parameters as GPT-2 small."""

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


def build(options: argparse.Namespace, *, kfac: bool, timings: bool = False) -> Any:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows,
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True, "fused": options.gpu}},
        "steps_per_print": 1000000,
    }
    if kfac:
        blocks: dict[str, Any] = {
            "factor": {"update_interval": UPDATE}, "eigenbasis": {"refresh_interval": REFRESH, "stagger": False},
            "burn_in": {"steps": 0}, "metrics": {"timings": timings},
        }  # fmt: skip
        for name, values in json.loads(options.kfac).items():
            blocks[name] = {**blocks.get(name, {}), **values} if isinstance(values, dict) else values
        config["kfac"] = blocks
    model = GPT2(GPTConfig(options.width, options.blocks, options.heads, options.context), options.vocabulary)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if kfac and not timings:
        print(engine.kfac.report)
    return engine


def timed_step(engine: Any, options: argparse.Namespace, step: int) -> float:
    """Seconds of forward, backward and step, waited for."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(options.vocabulary, (options.rows, options.context), generator=generator).to(engine.device)
    get_accelerator().synchronize()
    start = time.perf_counter()
    engine.backward(engine(x, x.roll(-1, 1)))
    engine.step()
    get_accelerator().synchronize()
    return time.perf_counter() - start


def kind(engine: Any) -> str:
    """Of the coming step."""
    due = engine.kfac.optimizer.due
    return "refresh" if due.refresh else "factor update" if due.capture else "preconditioning only"


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Kind of step -> seconds; without the first refresh and what allocates and compiles."""
    plain, preconditioned = build(options, kfac=False), build(options, kfac=True)
    times: dict[str, list[float]] = {"AdamW": [], **{name: [] for name in WEIGHTS}}
    for step in range(options.steps):
        name = kind(preconditioned)
        seconds = timed_step(plain, options, step), timed_step(preconditioned, options, step)
        if step >= min(UPDATE + 1, options.steps // 2):
            times["AdamW"].append(seconds[0])
            times[name].append(seconds[1])
    return times


def stages(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Stage -> (seconds of one, part of the steps that have it); each waited for, so their sum is more than a step."""
    engine = build(options, kfac=True, timings=True)
    metrics, found = engine.kfac.optimizer.metrics, {}
    spent: dict[str, dict[str, list[float]]] = {name: {} for name in STAGES}
    for step in range(REFRESH + UPDATE + 1):
        name, before = kind(engine), dict(metrics.seconds)
        timed_step(engine, options, step)
        if step > 0:
            for stage in STAGES:
                spent[stage].setdefault(name, []).append(metrics.seconds[stage] - before.get(stage, 0.0))
    for stage, by_kind in spent.items():
        medians = {name: statistics.median(values) for name, values in by_kind.items()}
        weighed = sum(WEIGHTS[name] * medians.get(name, 0.0) for name in WEIGHTS)
        found[stage] = max(medians.values()), weighed
    return found


def overhead(times: dict[str, list[float]]) -> tuple[dict[str, float], float]:
    """(Medians, what a step of K-FAC costs more than AdamW's, weighed), in seconds."""
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    missing = [name for name in ("AdamW", *WEIGHTS) if name not in medians]
    if missing:
        raise SystemExit(f"no step of kind {', '.join(missing)} was timed: more --steps, at least {2 * REFRESH + 2}")
    return medians, sum(weight * medians[name] for name, weight in WEIGHTS.items()) - medians["AdamW"]


def report(options: argparse.Namespace, times: dict[str, list[float]], parts: dict[str, tuple[float, float]]) -> str:
    """Markdown; writes the csv file too."""
    medians, more = overhead(times)
    base = medians["AdamW"]
    rows: list[list[Any]] = []
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        rows.append([name, 1e3 * medians[name], 1e3 * low, 1e3 * high, medians[name] / base, len(values)])
    rows.append([ROW, 1e3 * (base + more), "", "", 1 + more / base, ""])
    lines = ["| step | median [ms] | quartiles | to AdamW's | steps |", "|---|---|---|---|---|"]
    for name, median, low, high, ratio, count in rows:
        spread = f"{low:.1f}..{high:.1f}" if low != "" else ""
        lines.append(f"| {name} | {median:.1f} | {spread} | {ratio:.3f} | {count} |")
    verdict = "pass" if more / base < TARGET else "**fail**"
    lines.append(f"\nOverhead {more / base:.1%}, wanted below {TARGET:.0%}: {verdict}. {1e3 * more:.2f} ms a step, of "
                 "which all but captures are the same for any batch.\n")  # fmt: skip
    lines += ["| stage | most in a step [ms] | weighed [ms] | share |", "|---|---|---|---|"]
    total = sum(weighed for _, weighed in parts.values()) or 1.0
    for stage, (most, weighed) in parts.items():
        lines.append(f"| {stage} | {1e3 * most:.2f} | {1e3 * weighed:.3f} | {weighed / total:.0%} |")
        rows.append([f"stage {stage}", 1e3 * most, "", 1e3 * weighed, weighed / total, ""])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"step_{get_accelerator().device_name()}_{options.blocks}x{options.width}"
        with open(options.out / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows(
                [["what", "median ms", "low ms", "high or weighed ms", "to AdamW or share", "steps"], *rows]
            )
        (options.out / f"{name}.md").write_text(f"# {about(options)}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(lines)


def about(options: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if options.gpu else "CPU"
    return (f"Step on {device}, {options.blocks} x {options.width}, {options.rows} x {options.context} tokens, bf16, "
            f"ZeRO {options.stage}, torch {torch.__version__}, deepspeed {deepspeed.__version__}")  # fmt: skip


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"width": 768, "blocks": 12, "heads": 12, "context": 1024, "vocabulary": 50304, "rows": 32, "stage": 1}
    for name, default in {**sizes, "steps": 3 * REFRESH + 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kfac", default="{}", help="JSON: settings of the kfac block, over those of this run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    options.gpu = get_accelerator().device_name() == "cuda"
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in place.items():
        os.environ.setdefault(name, value)
    if not options.gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("nccl" if options.gpu else "gloo")
    page = report(options, measure(options), stages(options))
    print(f"\n{about(options)}\n\n{page}")
    return page


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort at exit
