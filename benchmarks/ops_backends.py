"""The main job with K-FAC's ops by plain torch and by the kernels, side by side: seconds per step, and the losses.

    python benchmarks/ops_backends.py [--backends torch cpp] [--ranks 2] [--steps 150] [--repeats 4] [--out FOLDER]
        [-- --width 256 ...]    (arguments of examples/train_gpt.py)

Every run is a job of its own processes; backends take turns, so that noise hits all of them. The first step of a run,
which allocates, is not counted. Prints medians and quartiles over all runs, and how far the losses are apart.
"""

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, float]
REFRESH = 1e-3
"""Seconds from which something was decomposed in a step."""
STEPS: dict[str, Callable[[Row], bool]] = {
    "every step": lambda row: True,
    "step that neither captures nor refreshes": lambda row: not row["capture"] and row["refresh"] < REFRESH,
    "capture step without refresh": lambda row: row["capture"] > 0 and row["refresh"] < REFRESH,
    "refresh step": lambda row: row["refresh"] >= REFRESH,
}
STAGES = ("capture", "reduce", "refresh", "precondition")
"""Of rank 0, in the steps that have them; sums are waited for and folded in reduce."""


def run(backend: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    """A job's steps: seconds, those of K-FAC's stages, losses."""
    config = json.loads(options.config.read_text())
    config["kfac"] = {**config.get("kfac", {}), "ops": {"backend": backend}, "metrics": {"timings": True}}
    for monitor in ("tensorboard", "csv_monitor"):
        config.pop(monitor, None)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(options.ranks)]
    job = ["examples/train_gpt.py", "--deepspeed_config", str(path), "--out", str(folder), "--name", "run"]
    job += ["--steps", str(options.steps), "--eval-interval", str(options.steps), "--no-plots", *options.arguments]
    done = subprocess.run([*launcher, *job], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the job with {backend} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    with open(folder / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    named = [{key.removeprefix("seconds_"): value for key, value in row.items()} for row in rows]
    return [{key: float(value) if value else 0.0 for key, value in row.items()} for row in named]


def measurements(jobs: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """What is timed -> milliseconds, over all runs of a backend."""
    rows = [row for job in jobs for row in job[1:]]
    found = {name: [1e3 * row["step_seconds"] for row in rows if counts(row)] for name, counts in STEPS.items()}
    for stage in STAGES:
        least = REFRESH if stage == "refresh" else 0.0
        found[f"{stage} of a step that has it"] = [1e3 * row[stage] for row in rows if row.get(stage, 0.0) > least]
    return {name: values for name, values in found.items() if len(values) > 1}


def table(jobs: Mapping[str, Sequence[Sequence[Row]]]) -> list[dict[str, object]]:
    """A row for every backend and what is timed; ``speed`` is the first backend's median over this one's. Captures are
    in the mean of all steps, not in their median."""
    rows: list[dict[str, object]] = []
    times = {backend: measurements(of) for backend, of in jobs.items()}
    first = next(iter(times.values()))
    for what in first:
        for backend, found in times.items():
            if what not in found:
                continue
            low, median, high = statistics.quantiles(found[what], n=4, method="inclusive")
            row = {"what": what, "backend": backend, "median_ms": median, "low_ms": low, "high_ms": high}
            row |= {"mean_ms": statistics.fmean(found[what]), "speed": statistics.median(first[what]) / median}
            rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            rows.append(rounded | {"count": len(found[what])})
    return rows


def losses(jobs: Mapping[str, Sequence[Sequence[Row]]]) -> list[str]:
    """How far apart the trainings are: of a backend with itself, then with the first one."""
    curves = {backend: [[row["loss"] for row in job] for job in of] for backend, of in jobs.items()}
    against, first = next((backend, of[0]) for backend, of in curves.items())
    lines = []
    for backend, of in curves.items():
        itself = max(abs(a - b) for curve in of for a, b in zip(curve, of[0], strict=True))
        apart = [abs(a - b) for a, b in zip(of[0], first, strict=True)]
        lines.append(
            f"{backend}: last loss {of[0][-1]:.6f}, apart from {against} at most {max(apart):.2g}, at the end "
            f"{apart[-1]:.2g}; its own runs at most {itself:.2g}"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["torch", "cpp"], help="the first is compared with")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpt_zero2_kfac.json")
    for name, default in (("ranks", 2), ("steps", 150), ("repeats", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = sys.argv[1:] if arguments is None else arguments
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split], argparse.Namespace(arguments=given[split + 1 :]))
    jobs: dict[str, list[list[Row]]] = {backend: [] for backend in options.backends}
    for repeat in range(options.repeats):
        for backend in options.backends if repeat % 2 == 0 else reversed(options.backends):
            with tempfile.TemporaryDirectory() as folder:
                jobs[backend].append(run(backend, options, Path(folder)))
            seconds = jobs[backend][-1][-1]["seconds"]
            print(f"run {repeat + 1} of {options.repeats}, {backend}: {seconds:.1f} s", flush=True)
    rows = table(jobs)
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{options.ranks} ranks, {options.config.name}, {options.steps} steps, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    for row in rows:
        times = f"{row['median_ms']:10.2f} ms  {row['low_ms']:.2f}..{row['high_ms']:.2f}, mean {row['mean_ms']:.2f}"
        print(f"{row['what']:42} {row['backend']:8} {times}, of {row['count']}; speed {row['speed']:.2f}")
    print(*losses(jobs), sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "ops_backends.csv", "w", newline="") as file:
        table_file = csv.DictWriter(file, list(rows[0]))
        table_file.writeheader()
        table_file.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
