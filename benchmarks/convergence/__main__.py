"""AdamW, Muon and K-FAC from the same initialisation on the same batches, each at its best learning
rate.

    python -m benchmarks.convergence [sweep] [final] [report] [--workers N] [--tasks gpt_small mlm]
    ...
    python -m benchmarks.convergence draw --out FOLDER    # more pictures of what is there, to FOLDER/runs

Without a phase: the first three. sweep tries learning rates on seed 0 and goes on while the best is
at an edge; final trains every method at its best rate on all seeds, all methods of a task and seed
in one process, step by step in turn, so that their times compare; report, which also ends the
others, packs the runs into one csv a task and writes tables and a picture a task. Finished runs are
kept: start it again after a kill. Every worker has a core to itself.
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

from benchmarks.convergence import reward_report
from benchmarks.convergence.autoencoder_tasks import AUTOENCODER_TASKS
from benchmarks.convergence.image_tasks import IMAGE_TASKS
from benchmarks.convergence.methods import (
    AUTOENCODER_METHODS,
    AUTOENCODER_RATES,
    DEFAULT_METHODS,
    IMAGE_METHODS,
    IMAGE_RATES,
    METHODS,
    RATES,
    REWARD_METHODS,
    REWARD_RATES,
)
from benchmarks.convergence.report import draw_more, report
from benchmarks.convergence.results import (
    EXTENSIONS,
    SWEEP_SEED,
    Job,
    Run,
    best_rate,
    check_settings,
    finished,
    next_rate,
    pack,
    read_all,
)
from benchmarks.convergence.reward_tasks import REWARD_TASKS
from benchmarks.convergence.run import race, settings, start
from benchmarks.convergence.tasks import DEFAULT_TASKS, TASKS

RESULTS = Path(__file__).resolve().parents[1] / "results/convergence"
TEXTS = DEFAULT_METHODS, RATES
KINDS = [
    (IMAGE_TASKS, (IMAGE_METHODS, IMAGE_RATES)),
    (AUTOENCODER_TASKS, (AUTOENCODER_METHODS, AUTOENCODER_RATES)),
    (REWARD_TASKS, (REWARD_METHODS, REWARD_RATES)),
]
PHASES = ["sweep", "final", "report"]
DRAW = "draw"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "phases", nargs="*", metavar="phase", help=f"of {PHASES}, the default, or {DRAW}"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT_TASKS)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="default: those of the kind of task"
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, help="where the sweep starts; default: each method's own"
    )
    parser.add_argument(
        "--extensions", type=int, default=EXTENSIONS, help="rates a sweep may add at its edges"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of the task's")
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--data", help="text file or folder; default: the Python standard library's sources"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if wrong := set(arguments.phases) - {*PHASES, DRAW}:
        parser.error(
            f"no such phase: {', '.join(sorted(wrong))}; choose from {', '.join([*PHASES, DRAW])}"
        )
    arguments.phases = arguments.phases or PHASES
    kinds = {id(own): own for own in map(of_kind, arguments.tasks)}
    arguments.methods = arguments.methods or (
        next(iter(kinds.values()))[0] if len(kinds) == 1 else DEFAULT_METHODS
    )
    return arguments


def of_kind(task: str) -> tuple[list[str], dict[str, list[float]]]:
    """Methods and rates of texts, images, autoencoders or rewards."""
    return next((own for tasks, own in KINDS if task in tasks), TEXTS)


class Benchmark:
    """The runs of one command and the pool that makes them."""

    def __init__(self, arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.arguments, self.pool = arguments, pool
        self.pairs = [(task, method) for task in arguments.tasks for method in arguments.methods]

    def steps(self, task: str) -> int:
        return self.arguments.steps or TASKS[task].steps

    def check_settings(self) -> None:
        """Before anything runs: what is on disk was made alike."""
        for task, method in self.pairs:
            options = (self.steps(task), self.arguments.stage, self.arguments.data)
            found = self.pool.submit(settings, task, method, *options).result()
            check_settings(self.arguments.out, task, method, found)

    def rates(self, task: str, method: str) -> list[float]:
        return self.arguments.rates or of_kind(task)[1][method]

    def sweep(self) -> None:
        tried = {(task, method): list(self.rates(task, method)) for task, method in self.pairs}
        jobs = [
            Job(task, method, tried[task, method][index], SWEEP_SEED)
            for index in range(max(map(len, tried.values()), default=0))
            for task, method in self.pairs
            if index < len(tried[task, method])
        ]
        while jobs:
            self.make([[job] for job in jobs], "sweep")
            jobs = []
            for (task, method), rates in tried.items():
                rate = next_rate(
                    self.losses(task, method, rates),
                    len(self.rates(task, method)),
                    self.arguments.extensions,
                )
                if rate is not None:
                    rates.append(rate)
                    jobs.append(Job(task, method, rate, SWEEP_SEED))

    def losses(self, task: str, method: str, rates: Iterable[float]) -> dict[float, float]:
        found = finished(self.arguments.out, task)
        return {rate: found[Job(task, method, rate, SWEEP_SEED).name].final for rate in rates}

    def final(self) -> None:
        best = {}
        for task, method in self.pairs:
            jobs = [
                run.job
                for run in finished(self.arguments.out, task).values()
                if run.job.method == method
            ]
            rates = [job.rate for job in jobs if job.seed == SWEEP_SEED and not job.final]
            best[task, method] = best_rate(self.losses(task, method, rates))
            if best[task, method] is None:
                print(f"{task} {method}: no rate to run, none swept or all diverged", flush=True)
        races = [
            [
                Job(task, method, rate, seed, final=True)
                for (of, method), rate in best.items()
                if of == task and rate
            ]
            for task in self.arguments.tasks
            for seed in self.arguments.seeds
        ]
        self.make([race for race in races if race], "final")

    def make(self, jobs: list[list[Job]], phase: str) -> None:
        """Make the races that are not yet there, in this order; a line for each run."""
        arguments = self.arguments
        made = {task: finished(arguments.out, task) for task in arguments.tasks}
        wanted = [race for race in jobs if not all(job.name in made[job.task] for job in race)]
        print(
            f"{phase}: {len(wanted)} runs to make, {len(jobs) - len(wanted)} there already",
            flush=True,
        )
        begin = time.perf_counter()
        options = (arguments.stage, arguments.data)
        futures = [
            self.pool.submit(race, jobs, arguments.out, self.steps(jobs[0].task), *options)
            for jobs in wanted
        ]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                left = (time.perf_counter() - begin) / number * (len(wanted) - number) / 60
                for made in future.result():
                    print(f"[{number}/{len(wanted)}] {line(made)}, {left:.0f} min left", flush=True)
        finally:
            for future in futures:
                future.cancel()


def line(run: Run) -> str:
    """A finished run in words."""
    job, seconds = run.job, run.rows[-1]["seconds"]
    end = (
        f"diverged at step {run.rows[-1]['step']:.0f}"
        if run.diverged
        else f"held out {run.final:.4f}"
    )
    milliseconds = 1000 * seconds / len(run.rows)
    return (
        f"{job.task} {job.method} lr {job.rate:g} seed {job.seed}: {end}, {seconds:.1f} s, "
        f"{milliseconds:.0f} ms a step"
    )


def make_pool(workers: int) -> ProcessPoolExecutor:
    """Processes that import DeepSpeed once; they start with the first job."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, start, (context.Value("i", 0),))


def main(argv: list[str] | None = None, pool: ProcessPoolExecutor | None = None) -> int:
    arguments = parse_arguments(argv)
    if DRAW in arguments.phases:
        print("\n".join(map(str, draw_more(read_all(arguments.out), arguments.out / "runs"))))
        return 0
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
        if "final" in arguments.phases:
            benchmark.final()
    print(page(arguments.out))
    return 0


def page(out: Path) -> str:
    """Pack the runs of a folder and make its report; one of rewards has its own."""
    pack(out)
    runs = read_all(out)
    rewards = bool(runs) and all(run.job.task in REWARD_TASKS for run in runs)
    return reward_report.report(out, runs) if rewards else report(out)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
