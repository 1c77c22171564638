"""Train models by several optimizers from the same weights on the same batches, and compare them.

    python -m benchmarks.convergence [sweep] [final] [report] [--tasks gpt_small mlm] ...
    python -m benchmarks.convergence final --tasks gpt2_small --rates adamw=1e-3 --seconds 450

sweep tries learning rates with seed 0, and goes on while the best one is at an edge. final trains
every method at its best rate, or at the one that ``--rates`` names, with all seeds; methods of
small models train in one process, step by step in turn, so that their times compare. report, which
also ends the other two, packs the runs into a csv for each task and writes tables and plots.
Without a phase all three run.

Finished runs are kept, so a command that was killed can be started again. With ``--seconds`` it
ends in time, saves the run that it was at if ``--saves`` names a folder, and says what it left
out; the same command goes on there.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.convergence import methods as known
from benchmarks.convergence.report import report
from benchmarks.convergence.runs import (
    EXTENSIONS,
    SWEEP_SEED,
    Job,
    best_rate,
    check_settings,
    finished,
    next_rate,
    pack,
)
from benchmarks.convergence.tasks import (
    DEFAULT_TASKS,
    METHODS_OF,
    RATES_OF,
    TASKS,
    TEXT_METHODS,
)
from benchmarks.convergence.work import Options, race, settings, start

RESULTS = Path(__file__).resolve().parents[1] / "results/convergence"
PHASES = ["sweep", "final", "report"]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="*", metavar="phase", help=f"of {PHASES}; default: all")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT_TASKS)
    parser.add_argument("--methods", nargs="+", choices=known.METHODS, help="default: by the task")
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[],
        metavar="RATE",
        help="where sweeps start; METHOD=RATE: the method's rate, without a sweep",
    )
    parser.add_argument("--extensions", type=int, default=EXTENSIONS, help="rates added at edges")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of the task's")
    parser.add_argument("--stage", type=int, help="of ZeRO, instead of the task's")
    parser.add_argument("--workers", type=int, default=1, help="processes, each on a core")
    parser.add_argument("--data", help="file or folder of texts, packages or images")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole command")
    parser.add_argument("--reserve", type=float, default=5.0, help="seconds for a save at the end")
    parser.add_argument("--saves", type=Path, help="folder for checkpoints of runs that go on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if wrong := set(arguments.phases) - set(PHASES):
        parser.error(f"no such phase: {', '.join(sorted(wrong))}; choose from {', '.join(PHASES)}")
    arguments.phases = arguments.phases or PHASES
    pairs = [text.split("=") for text in arguments.rates if "=" in text]
    try:
        arguments.given = {method: float(rate) for method, rate in pairs}
        arguments.rates = [float(text) for text in arguments.rates if "=" not in text]
    except ValueError as error:
        parser.error(f"--rates: {error}; expected 2e-3 or kfacadamw=2e-3")
    if unknown := set(arguments.given) - set(known.METHODS):
        parser.error(f"--rates: unknown methods {', '.join(sorted(unknown))}")
    return arguments


class Benchmark:
    """The runs of one command, and the pool of processes that makes them."""

    def __init__(self, arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.arguments, self.pool, self.out = arguments, pool, arguments.out
        self.options = Options(
            out=arguments.out,
            data=arguments.data,
            stage=arguments.stage,
            steps=arguments.steps,
            ends=time.monotonic() + arguments.seconds,
            reserve=arguments.reserve,
            saves=arguments.saves,
        )
        self.left_out: list[str] = []
        self.pairs = [
            (task, method)
            for task in arguments.tasks
            for method in arguments.methods or METHODS_OF.get(task, TEXT_METHODS)
        ]

    def check_settings(self) -> None:
        """Before anything runs, make sure that what is on disk was made with the same settings."""
        for task, method in self.pairs:
            job = Job(task, method, 1.0, SWEEP_SEED)
            found = self.pool.submit(settings, job, self.options).result()
            check_settings(self.out, task, method, found)

    def first_rates(self, task: str, method: str) -> list[float]:
        own = RATES_OF.get(task, {}).get(method, known.RATES[method])
        return list(self.arguments.rates or own)

    def sweep(self) -> None:
        pairs = [pair for pair in self.pairs if pair[1] not in self.arguments.given]
        tried = {pair: self.first_rates(*pair) for pair in pairs}
        most = max(map(len, tried.values()), default=0)
        jobs = [
            Job(*pair, rates[index], SWEEP_SEED)
            for index in range(most)
            for pair, rates in tried.items()
            if index < len(rates)
        ]
        while jobs:
            self.make([[job] for job in jobs], "sweep")
            if self.left_out:
                return
            jobs = []
            for (task, method), rates in tried.items():
                first = len(self.first_rates(task, method))
                errors = self.errors(task, method, rates)
                rate = next_rate(errors, first, self.arguments.extensions)
                if rate is not None:
                    rates.append(rate)
                    jobs.append(Job(task, method, rate, SWEEP_SEED))

    def errors(self, task: str, method: str, rates: Iterable[float]) -> dict[float, float]:
        found, judged_by = finished(self.out, task), TASKS[task].judged_by
        names = {rate: Job(task, method, rate, SWEEP_SEED).name for rate in rates}
        return {rate: found[name].error(judged_by) for rate, name in names.items()}

    def best_rate(self, task: str, method: str) -> float | None:
        if method in self.arguments.given:
            return self.arguments.given[method]
        jobs = [run.job for run in finished(self.out, task).values() if run.job.method == method]
        rates = [job.rate for job in jobs if job.seed == SWEEP_SEED and not job.final]
        found = best_rate(self.errors(task, method, rates))
        if found is None:
            print(f"{task} {method}: no rate to run, none swept or all diverged", flush=True)
        return found

    def final(self) -> None:
        best = {pair: self.best_rate(*pair) for pair in self.pairs}
        races = []
        for task in self.arguments.tasks:
            for seed in self.arguments.seeds:
                jobs = [
                    Job(task, method, rate, seed, final=True)
                    for (of, method), rate in best.items()
                    if of == task and rate is not None
                ]
                races += [[job] for job in jobs] if TASKS[task].alone else [jobs]
        self.make([race for race in races if race], "final")

    def make(self, jobs: list[list[Job]], phase: str) -> None:
        """Make the races that are not there yet, in this order; print a line for each run."""
        made = {task: finished(self.out, task) for task in self.arguments.tasks}
        missing = [[job for job in race if job.name not in made[job.task]] for race in jobs]
        wanted = [race for race in missing if race]
        there = len(jobs) - len(wanted)
        print(f"{phase}: {len(wanted)} runs to make, {there} there already", flush=True)
        futures = {self.pool.submit(race, jobs, self.options): jobs for jobs in wanted}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                is_complete = future.result()
                for job in futures[future]:
                    line = self.line(job) if is_complete else f"{job.task} {job.name}: left out"
                    print(f"[{number}/{len(wanted)}] {line}", flush=True)
                    if not is_complete:
                        self.left_out.append(f"{job.task}/{job.name}")
        finally:
            for future in futures:
                future.cancel()

    def line(self, job: Job) -> str:
        run = finished(self.out, job.task)[job.name]
        end = f"held out {run.final:.4f}"
        if run.accuracy is not None:
            end += f", {run.accuracy:.1%} right"
        if run.diverged:
            end = f"diverged at step {run.rows[-1]['step']:.0f}"
        seconds = run.rows[-1]["seconds"]
        each = 1000 * seconds / len(run.rows)
        return f"{job.task} {job.name}: {end}, {seconds:.1f} s, {each:.0f} ms a step"


def make_pool(workers: int) -> ProcessPoolExecutor:
    """Return processes that import DeepSpeed once; they start with the first job."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0) if workers > 1 else None
    return ProcessPoolExecutor(workers, context, start, (counter,))


def main(argv: list[str] | None = None, pool: ProcessPoolExecutor | None = None) -> int:
    arguments = parse_arguments(argv)
    left_out: list[str] = []
    with contextlib.nullcontext(pool) if pool else make_pool(arguments.workers) as pool:
        benchmark = Benchmark(arguments, pool)
        if set(arguments.phases) - {"report"}:
            try:
                benchmark.check_settings()
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        if "sweep" in arguments.phases:
            benchmark.sweep()
        if "final" in arguments.phases and not benchmark.left_out:
            benchmark.final()
        left_out = benchmark.left_out
    pack(arguments.out)
    print(report(arguments.out))
    if left_out:
        print(f"left out, the same command goes on: {', '.join(left_out)}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
