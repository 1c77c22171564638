"""What a step costs with K-FAC and without, side by side in one run, on any stage and number of
ranks.

    deepspeed --num_accelerators 2 benchmarks/step.py --stage 2 [--out benchmarks/results]

The engines alternate, so that noise hits both. Prints medians and spread of each kind of step, the
ratio to AdamW's step, bytes on the wire per rank and K-FAC state per rank.
"""

import argparse
import csv
import io
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).parent.parent))
import ds_kfac
from benchmarks.held import nbytes_of
from benchmarks.mean_step import ROW, WEIGHTS
from ds_kfac.comm.reduce import payloads
from ds_kfac.plan import plan as planning
from examples.gpt import GPT, GPTConfig

UPDATE, REFRESH, STEPS = 4, 8, 25

COLUMNS = ["device", "stage", "ranks", "what", "median ms or count", "min ms", "max ms", "to AdamW"]


def build(arguments: argparse.Namespace, *, kfac: bool):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "zero_optimization": {"stage": arguments.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1000000,
    }
    if kfac:
        planning.LONG_REFRESH = math.inf  # each kind of work in a step of its own
        config["kfac"] = {
            "factor": {"update_interval": UPDATE},
            "eigenbasis": {"refresh_interval": REFRESH},
        }
    model = GPT(GPTConfig(arguments.width, arguments.blocks, 4, arguments.context))
    return ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def timed_step(engine, arguments: argparse.Namespace, step: int) -> float:
    generator = torch.Generator().manual_seed(step * 7 + dist.get_rank())
    x = torch.randint(256, (arguments.rows, arguments.context), generator=generator).to(
        engine.device
    )
    get_accelerator().synchronize()
    dist.barrier()
    start = time.perf_counter()
    engine.backward(engine(x, x))
    engine.step()
    get_accelerator().synchronize()
    return time.perf_counter() - start


def kind(step: int) -> str:
    if step % REFRESH == 0:
        return "refresh"
    return "factor update" if step % UPDATE == 0 else "preconditioning only"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("stage", 2),
        ("width", 256),
        ("blocks", 4),
        ("context", 128),
        ("rows", 8),
        ("local_rank", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if on_cpu else None)
    plain, preconditioned = build(arguments, kfac=False), build(arguments, kfac=True)
    times: dict[str, list[float]] = {"AdamW": []}
    for step in range(STEPS):
        seconds = timed_step(plain, arguments, step), timed_step(preconditioned, arguments, step)
        if step > 0:  # the first step allocates
            times["AdamW"].append(seconds[0])
            times.setdefault(kind(step), []).append(seconds[1])
    if dist.get_rank() == 0:
        report(arguments, preconditioned.kfac.preconditioner, times)


def report(arguments: argparse.Namespace, kfac, times: dict[str, list[float]]) -> None:
    base = statistics.median(times["AdamW"])
    medians = {name: statistics.median(values) for name, values in times.items()}
    mean = sum(weight * medians[name] for name, weight in WEIGHTS.items())
    device = get_accelerator().device_name()
    print(
        f"\n{platform.processor() or platform.machine()}, {device}, torch {torch.__version__}, "
        f"deepspeed "
        f"{deepspeed.__version__}, {dist.get_world_size()} ranks, ZeRO {arguments.stage}, width "
        f"{arguments.width}, "
        f"{arguments.blocks} blocks, {arguments.rows * arguments.context} tokens a rank"
    )
    print(f"{'step':24} {'median [ms]':>12} {'min..max [ms]':>18} {'to AdamW':>9} {'steps':>6}")
    rows = []
    for name, values in times.items():
        spread = f"{1000 * min(values):.1f}..{1000 * max(values):.1f}"
        print(
            f"{name:24} {1000 * medians[name]:12.1f} {spread:>18} {medians[name] / base:9.2f} "
            f"{len(values):6d}"
        )
        rows.append(
            [
                name,
                1000 * medians[name],
                1000 * min(values),
                1000 * max(values),
                medians[name] / base,
            ]
        )
    print(f"{ROW:24} {1000 * mean:12.1f} {'':>18} {mean / base:9.2f}")
    rows.append([ROW, 1000 * mean, "", "", mean / base])
    rank, world, exchange = kfac.rank, kfac.layout.world, kfac.exchange
    sent = [
        sum(sum(numels) for (source, _), numels in plan.sizes.items() if source == rank)
        for plan in (exchange.plan.gather, exchange.plan.scatter)
    ]
    reducer = kfac.curvature.reducer
    _, buckets = reducer.plan.of(frozenset(kfac.curvature.specs), 0)
    sums = [
        nbytes
        for bucket in buckets
        for part in payloads(bucket, kfac.plan.wire.itemsize)
        for (source, _), nbytes in part.items()
        if source == rank
    ]
    counts = {
        "bytes sent by rank 0, every step": 4 * sum(sent),
        "bytes sent by rank 0, factor update": sum(sums),
        "K-FAC state of rank 0": nbytes_of(kfac)[0],
        "gradient elements of all layers": sum(layer.numel for layer in kfac.layers),
    }
    for name, count in counts.items():
        print(f"{name:40} {count:14,}")
        rows.append([name, count, "", "", ""])
    if arguments.out:
        path = arguments.out / "step.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        key = [str(device), str(arguments.stage), str(world)]
        with open(path, newline="") if path.exists() else io.StringIO() as file:
            others = [row for row in csv.reader(file) if row[:3] not in (key, COLUMNS[:3])]
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *others, *([*key, *row] for row in rows)])


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
