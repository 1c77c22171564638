"""What a training step costs by AdamW, Muon, KFACAdamW and K-FAC into AdamW.

    python benchmarks/step.py [--trace] [--seconds 450] --out FOLDER                # one device
    deepspeed --num_accelerators 2 benchmarks/step.py --model gpt --fp32 --stage 2 --together

A step is timed until its own stream is done; a decomposition on another stream may go on beside the
next steps. After the steps that compile, capture CUDA graphs and make the first refreshes, whole
refresh intervals are timed at the default intervals: the median of each kind of step, the mean of
all, and what K-FAC sends. With ``--trace`` a step of each kind is recorded by torch.profiler then.

Methods run one after the other, or step by step in turn with ``--together``. A method is in
step.csv when it is done, and the next call skips it. With ``--seconds`` no method is begun that
would not end in time, and the last line says what was left out.
"""

import argparse
import contextlib
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.convergence import loop
from benchmarks.convergence.gpt2 import GPT2Config
from benchmarks.convergence.methods import deepspeed_config
from benchmarks.convergence.tasks import BF16_ZERO1, RandomTokenTask
from benchmarks.held import nbytes_of
from ds_kfac.config.keys import parse
from ds_kfac.config.resolve import resolve
from ds_kfac.plan import plan as planning

UPDATE, REFRESH = resolve(parse({}), fisher="empirical")[0].schedule.intervals(10**9)
"""Default number of steps between factor updates, and between refreshes."""
METHODS = {
    "AdamW": "adamw",
    "Muon": "muon",
    "KFACAdamW": "kfacadamw",
    "K-FAC into AdamW": "kfac_adamw",
}
RATE = 3e-4
MODELS = {
    "gpt2_small": GPT2Config(vocabulary=50304, tied=True),
    "gpt": GPT2Config(width=256, blocks=4, heads=4, context=128, vocabulary=256),
    "tiny": GPT2Config(width=16, blocks=1, heads=2, context=5, vocabulary=64),
}
ROWS = {"gpt2_small": 32, "gpt": 16, "tiny": 2}
"""Examples of a rank in a step."""
MEAN = f"mean at intervals {UPDATE}/{REFRESH}"
COLUMNS = tuple(
    """
    device model stage ranks method what median_ms low_ms high_ms of_adamw count memory_mb
    sent_mb state_mb problem
    """.split()
)
Row = dict[str, Any]


@dataclass
class Measured:
    """A method's timed steps: their kinds, seconds, and bytes that this rank sent for K-FAC."""

    kinds: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    memory: float = 0.0
    state: int = 0

    def rows(self, adamw: float | None) -> Iterator[Row]:
        """Yield a row for each kind of step, then the mean.

        ``adamw``: seconds of AdamW's mean step.
        """
        state = {"memory_mb": self.memory / 1e6, "state_mb": self.state / 1e6}
        for kind in dict.fromkeys(self.kinds):
            chosen = [index for index, own in enumerate(self.kinds) if own == kind]
            seconds = [self.seconds[index] for index in chosen]
            low, middle, high = _quartiles(seconds)
            yield {
                "what": kind,
                "median_ms": 1e3 * middle,
                "low_ms": 1e3 * low,
                "high_ms": 1e3 * high,
                "of_adamw": middle / adamw if adamw else "",
                "count": len(seconds),
                "sent_mb": statistics.median(self.sent[index] for index in chosen) / 1e6,
                **state,
            }
        yield {
            "what": MEAN,
            "median_ms": 1e3 * self.mean,
            "of_adamw": self.mean / adamw if adamw else "",
            "count": len(self.seconds),
            "sent_mb": statistics.fmean(self.sent) / 1e6,
            **state,
        }

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Stepper:
    """A method's engine, trained by the loop of all benchmarks on random tokens."""

    def __init__(self, options: argparse.Namespace, method: str) -> None:
        self.options, self.measured = options, Measured()
        self.has_kfac = "KFAC" in method or "K-FAC" in method
        self.warm_up = REFRESH + UPDATE + 1 if self.has_kfac else UPDATE + 1
        self.count = options.periods * REFRESH
        engine = {**BF16_ZERO1, "zero_optimization": {"stage": options.stage}}
        if options.fp32:
            engine.pop("bf16")
        task = RandomTokenTask(MODELS[options.model], options.rows, steps=10**6, engine=engine)
        config = deepspeed_config(METHODS[method], RATE, task, task.steps)
        config.pop("scheduler")
        if self.has_kfac:
            config["kfac"] = {"burn_in": {"steps": 0}}
            planning.LONG_REFRESH = math.inf if options.at_once else options.long_refresh
        rank = torch.distributed.get_rank()
        table = options.out / "steps" / f"{options.key}_{METHODS[method]}_rank{rank}.csv"
        self.training = loop.Training(
            replace(task), None, config, seed=0, steps=task.steps, part="test", table=table
        )

    @property
    def done(self) -> bool:
        return self.training.step_number >= self.warm_up + self.count

    def step(self) -> Row:
        before = self.sent
        row = self.training.step()
        if row["step"] > self.warm_up:
            self.measured.kinds.append(row["kind"])
            self.measured.seconds.append(row["step_seconds"])
            self.measured.sent.append(self.sent - before)
        return row

    @property
    def sent(self) -> int:
        if not self.has_kfac:
            return 0
        return sum(self.training.engine.kfac.preconditioner.channel.sent.values())

    def close(self) -> Measured:
        self.measured.memory = self.training.accelerator.max_memory_allocated()
        if self.has_kfac:
            self.measured.state = nbytes_of(self.training.engine.kfac.preconditioner)[0]
        self.training.close()
        return self.measured

    def trace(self, name: str) -> None:
        """Record a step of each kind: a trace for a viewer, and a table of what took longest."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        kinds = set(self.measured.kinds)
        for _ in range(2 * REFRESH):
            kind = loop.kind_of_next_step(self.training.engine)
            if kind not in kinds:
                self.training.step()
                continue
            kinds.remove(kind)
            with profile(activities=activities) as recorded:
                self.training.step()
            stem = f"trace_{name}_{kind}".replace(" ", "_")
            recorded.export_chrome_trace(str(self.options.out / f"{stem}.json.gz"))
            column = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
            table = recorded.key_averages().table(sort_by=column, row_limit=40)
            (self.options.out / f"{stem}.txt").write_text(table)
            if not kinds:
                return


class Table:
    """step.csv: the rows of all calls. Only rank 0 writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = options.out / "step.csv"
        self.writes = torch.distributed.get_rank() == 0
        self.key = {"device": options.device, "model": options.model}
        self.key |= {"stage": str(options.stage), "ranks": str(torch.distributed.get_world_size())}
        self.rows: list[Row] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def mean(self, method: str) -> float | None:
        """Return the seconds of a method's mean step, if an earlier call or this one has it."""
        key = {**self.key, "method": method, "what": MEAN}
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return float(row["median_ms"]) / 1e3
        return None

    def add(self, method: str, rows: Iterator[Row]) -> None:
        same = {**self.key, "method": method}
        self.rows = [
            row for row in self.rows if any(row.get(key) != value for key, value in same.items())
        ]
        for row in rows:
            written = {**same, **{key: _rounded(value) for key, value in row.items()}}
            self.rows.append(written)
            if self.writes:
                shown = (f"{key} {value}" for key, value in written.items() if value != "")
                print(", ".join(shown), flush=True)
        if self.writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            with partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)
            partial.rename(self.path)


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def measure_one(options: argparse.Namespace, method: str, table: Table) -> None:
    stepper = Stepper(options, method)
    try:
        while not stepper.done:
            stepper.step()
        if options.trace and torch.distributed.get_rank() == 0:
            stepper.trace(METHODS[method])
    finally:
        measured = stepper.close()
    table.add(method, measured.rows(measured.mean if method == "AdamW" else table.mean("AdamW")))


def measure_together(options: argparse.Namespace, methods: Sequence[str], table: Table) -> None:
    steppers = {method: Stepper(options, method) for method in methods}
    for stepper in steppers.values():
        while stepper.training.step_number < stepper.warm_up:
            stepper.step()
    while any(not stepper.done for stepper in steppers.values()):
        for stepper in steppers.values():
            torch.distributed.barrier()
            stepper.step()
    found = {method: stepper.close() for method, stepper in steppers.items()}
    adamw = found["AdamW"].mean if "AdamW" in found else table.mean("AdamW")
    for method, measured in found.items():
        table.add(method, measured.rows(adamw))


def expected_seconds(options: argparse.Namespace, table: Table, method: str) -> float:
    """Guess how long a method takes: a start, and steps of up to twice AdamW's seconds."""
    steps = (options.periods + 1) * REFRESH + UPDATE
    return options.start_seconds + 2 * steps * (table.mean("AdamW") or 0.0)


def run(options: argparse.Namespace) -> int:
    """Return the number of methods that failed."""
    began, table, failed = time.monotonic(), Table(options), 0
    left_out = []
    wanted = [method for method in options.methods if table.mean(method) is None]
    if options.together and wanted:
        measure_together(options, options.methods, table)
        return 0
    for method in wanted:
        left = options.seconds - (time.monotonic() - began)
        if left < expected_seconds(options, table, method):
            left_out.append(method)
            continue
        try:
            measure_one(options, method, table)
        except Exception as problem:
            failed += 1
            text = f"{type(problem).__name__}: {problem}".splitlines()[0]
            table.add(method, iter([{"what": "failed", "problem": text}]))
    print(f"left out, the same command goes on: {', '.join(left_out) or 'nothing'}", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt2_small")
    parser.add_argument("--rows", type=int, help="examples of a rank in a step")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--periods", type=int, default=2, help=f"timed, of {REFRESH} steps")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--together", action="store_true", help="all engines at once, in turn")
    parser.add_argument("--at-once", action="store_true", help="refresh all factors in one step")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--trace", action="store_true", help="record steps by torch.profiler, too")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole call")
    parser.add_argument("--start-seconds", type=float, default=30.0, help="to build an engine")
    parser.add_argument("--out", type=Path, default=Path("runs/step"))
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.rows = options.rows or ROWS[options.model]
    options.long_refresh = planning.LONG_REFRESH
    loop.join()
    on_gpu = torch.cuda.is_available()
    options.device = torch.cuda.get_device_name() if on_gpu else "CPU"
    options.key = f"{options.model}_zero{options.stage}"
    return 1 if run(options) else 0


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(RuntimeError):
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads now and then abort at exit
