"""Runs of the convergence benchmark on disk: a csv is a finished run, whatever else lies there is
not.

<out>/runs/<task>/<method>_lr<rate>_seed<seed>.csv         a run of the sweep, as it was made: columns COLUMNS, a row a
                                                           step; its held-out loss is of the
                                                           validation part
<out>/runs/<task>/<method>_lr<rate>_seed<seed>_final.csv   one of a race, timed step by step against the others; of the
                                                           test part
<out>/runs/<task>/<method>.json                            the settings of all those runs
<out>/<task>.csv                                           all runs of a task, packed: columns KEYS, which are empty
                                                           where they are those of the row above,
                                                           and a run's
<out>/settings.json                                        task -> method -> settings

git ignores folders that are named runs. A run that is in both places is read from runs.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ["step", "seconds", "loss", "held_out_loss", "step_seconds", "held_out_accuracy"]
REWARD_COLUMNS = [*COLUMNS, "samples", "entropy", "kl"]
"""Of tasks that learn from rewards, whose losses are shares of wrong answers."""
KEYS = ["method", "rate", "seed", "final"]
"""Of a packed csv, before the columns of a run; ``final`` is 1 for one of a race, 0 for one of the
sweep."""
DIVERGED = 1.5
"""A loss beyond this times the first one, or not finite, ends a run."""
EXTENSIONS = 3
SWEEP_SEED = 0


@dataclass(frozen=True)
class Job:
    """One run to make; ``final`` if it is part of a race."""

    task: str
    method: str
    rate: float
    seed: int
    final: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}_lr{self.rate:g}_seed{self.seed}{'_final' if self.final else ''}"

    def path(self, out: Path) -> Path:
        return out / "runs" / self.task / f"{self.name}.csv"


@dataclass(frozen=True)
class Run:
    """A finished run; an empty cell is nan."""

    job: Job
    rows: list[dict[str, float]]

    @property
    def diverged(self) -> bool:
        return is_diverged(self.rows[-1]["loss"], self.rows[0]["loss"])

    @property
    def final(self) -> float:
        """The last held-out loss; infinite if it diverged."""
        last = self.rows[-1]["held_out_loss"]
        return math.inf if self.diverged or not math.isfinite(last) else last

    @property
    def accuracy(self) -> float | None:
        """The last held-out one; None if the task has none."""
        value = self.rows[-1].get("held_out_accuracy", math.nan)
        return value if math.isfinite(value) else None

    @property
    def step_seconds(self) -> list[float]:
        return [row["step_seconds"] for row in self.rows]

    def held_out(self) -> list[dict[str, float]]:
        """Rows with a held-out loss."""
        return [row for row in self.rows if math.isfinite(row["held_out_loss"])]

    def packed(self) -> list[dict[str, float]]:
        """All rows of a race; of a sweep those that a page asks for: the first, the first evaluated
        one, the best and the last."""
        if self.job.final:
            return self.rows
        evaluated = self.held_out()
        kept = [self.rows[0], self.rows[-1], *evaluated[:1]]
        kept += [min(evaluated, key=lambda row: row["held_out_loss"])] if evaluated else []
        return [row for row in self.rows if any(row is one for one in kept)]


def is_diverged(loss: float, first: float) -> bool:
    return not (math.isfinite(loss) and loss <= DIVERGED * first)


def write(
    path: Path, rows: Iterable[Mapping[str, object]], columns: Sequence[str] = COLUMNS
) -> None:
    """Write row by row as the run makes them; the name is given when the last is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        for row in rows:
            table.writerow({key: f"{value:.6g}" for key, value in row.items()})
    partial.rename(path)


def read(job: Job, out: Path) -> Run:
    """A finished run. Raises KeyError if there is none."""
    return finished(out, job.task)[job.name]


def finished(out: Path, task: str) -> dict[str, Run]:
    """Name of a job -> run, of all finished runs of a task."""
    found = {run.job.name: run for run in read_packed(out / f"{task}.csv")}
    for path in (out / "runs" / task).glob("*.csv"):
        if match := re.fullmatch(r"([\w.]+)_lr([^_]+)_seed(\d+)(_final)?", path.stem):
            job = Job(task, match[1], float(match[2]), int(match[3]), final=bool(match[4]))
            with open(path, newline="") as file:
                found[job.name] = Run(job, [_numbers(row) for row in csv.DictReader(file)])
    return found


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    return {key: float(cell or "nan") for key, cell in row.items() if key not in KEYS}


def read_all(out: Path) -> list[Run]:
    """Every finished run of a results folder, packed or not."""
    tasks = {path.stem for path in out.glob("*.csv")} | {
        path.name for path in (out / "runs").glob("*")
    }
    runs = [run for task in sorted(tasks) for run in finished(out, task).values()]
    return sorted(
        runs,
        key=lambda run: (run.job.task, run.job.method, run.job.rate, run.job.seed, run.job.final),
    )


def read_packed(path: Path) -> Iterator[Run]:
    """The runs of a packed csv; none of another."""
    if not path.exists():
        return
    with open(path, newline="") as file:
        table = csv.DictReader(file)
        if (table.fieldnames or [])[: len(KEYS)] != KEYS:
            return
        run = None
        for row in table:
            if row["method"]:
                if run is not None:
                    yield run
                job = Job(
                    path.stem,
                    row["method"],
                    float(row["rate"]),
                    int(row["seed"]),
                    final=row["final"] == "1",
                )
                run = Run(job, [])
            run.rows.append(_numbers(row))
        if run is not None:
            yield run


def pack(out: Path) -> None:
    """Write all finished runs to a csv a task, and their settings to one file. Nothing below runs
    is removed."""
    by_task: dict[str, list[Run]] = {}
    for run in read_all(out):
        by_task.setdefault(run.job.task, []).append(run)
    for task, runs in by_task.items():
        write_packed(out / f"{task}.csv", runs)
    known = read_settings(out)
    if known:
        (out / "settings.json").write_text(json.dumps(known, indent=0) + "\n")


def write_packed(path: Path, runs: Sequence[Run]) -> None:
    made = {
        key
        for run in runs
        for row in run.rows
        for key, value in row.items()
        if not math.isnan(value)
    }
    columns = [column for column in REWARD_COLUMNS if column in made or column in COLUMNS[:-1]]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(
            file, [*KEYS, *columns], restval="", extrasaction="ignore", lineterminator="\n"
        )
        table.writeheader()
        for run in runs:
            job = run.job
            keys = {
                "method": job.method,
                "rate": f"{job.rate:g}",
                "seed": job.seed,
                "final": int(job.final),
            }
            for row in run.packed():
                table.writerow(
                    keys
                    | {key: f"{value:.6g}" for key, value in row.items() if not math.isnan(value)}
                )
                keys = {}


def read_settings(out: Path) -> dict[str, dict[str, dict]]:
    """Task -> method -> settings of the runs of a folder."""
    path = out / "settings.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for path in sorted((out / "runs").glob("*/*.json")):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return found


def check_settings(out: Path, task: str, method: str, settings: dict) -> None:
    """Keep runs of other settings out of the same table. A key of ``kfac`` that is newer than the
    runs had its default in them; set to something else it is in "config at rate 1", too.

    Raises:
        ValueError: the folder has runs of this method that were made with other settings.
    """
    settings = json.loads(json.dumps(settings))
    before = read_settings(out).get(task, {}).get(method, settings)
    if (defaults := "kfac with defaults") in before and defaults in settings:
        before = {**before, defaults: filled(before[defaults], settings[defaults])}
    if before != settings and any(run.job.method == method for run in finished(out, task).values()):
        keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        raise ValueError(
            f"{out}: its runs of {task} by {method} were made with other settings "
            f"({', '.join(keys)}); use another "
            f"--out, or remove them from {task}.csv and runs/{task} to make them again"
        )
    path = out / "runs" / task / f"{method}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")


def filled(before: Any, now: Any) -> Any:
    """``before``, with what only ``now`` has at any depth of dicts."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before
    return {**now, **{key: filled(value, now.get(key)) for key, value in before.items()}}


def best_rate(losses: Mapping[float, float]) -> float | None:
    """The rate of the lowest loss; None if all are infinite."""
    best = min(sorted(losses), key=losses.__getitem__, default=None)
    return best if best is not None and math.isfinite(losses[best]) else None


def next_rate(
    losses: Mapping[float, float], started_with: int, extensions: int = EXTENSIONS
) -> float | None:
    """The rate to try next if the best is at an edge, two apart; below all if all diverged; None
    when done."""
    if len(losses) - started_with >= extensions:
        return None
    low, high, best = min(losses), max(losses), best_rate(losses)
    if best is None or best == low:
        return low / 2
    return high * 2 if best == high else None
