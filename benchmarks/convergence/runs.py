"""Runs on disk: a csv is a finished run, everything else that lies there is not.

    <out>/runs/<task>/<method>_lr<rate>_seed<seed>.csv        a run of the sweep, a row for each
                                                              step; judged by validation data
    <out>/runs/<task>/<method>_lr<rate>_seed<seed>_final.csv  at the best rate, by test data
    <out>/runs/<task>/<name>.partial                          a run that is not finished
    <out>/runs/<task>/<method>.json                           what all runs of a method share
    <out>/<task>.csv                                          all runs of a task, packed
    <out>/settings.json                                       task to method to settings

In a packed csv the columns ``KEYS`` stand before a run's own, in the run's first row only. Git
ignores folders that are named runs. A run that is in both places is read from runs.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
COLUMNS = tuple(
    "step seconds loss held_out_loss step_seconds held_out_accuracy memory_mb cold kind".split()
)
PACKED_COLUMNS = COLUMNS[:7]
KEYS = ["method", "rate", "seed", "final"]
DIVERGED = 1.5
"""A run ends when its loss is not finite, or more than this times the first one."""
EXTENSIONS = 3
"""Rates that a sweep may add at its edges."""
SWEEP_SEED = 0


@dataclass(frozen=True)
class Job:
    """A run to make.

    ``final``: at the best rate, judged by the test part; else a run of the sweep.
    """

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
    rows: list[Row]

    @property
    def diverged(self) -> bool:
        return is_diverged(self.rows[-1]["loss"], self.rows[0]["loss"])

    @property
    def final(self) -> float:
        """The last held-out loss; infinite if the run diverged."""
        last = self.rows[-1]["held_out_loss"]
        return math.inf if self.diverged or not math.isfinite(last) else last

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy; None if the task has none."""
        value = self.rows[-1].get("held_out_accuracy", math.nan)
        return value if math.isfinite(value) else None

    @property
    def step_seconds(self) -> list[float]:
        return [row["step_seconds"] for row in self.rows]

    def error(self, judged_by: str = "held_out_loss") -> float:
        """What rates and methods are compared by: the lower, the better."""
        if judged_by == "held_out_loss":
            return self.final
        return math.inf if self.diverged or self.accuracy is None else 1 - self.accuracy

    def curve(self, judged_by: str = "held_out_loss") -> list[Row]:
        """The evaluated rows, each with its "error"."""
        evaluated = [row for row in self.rows if math.isfinite(row["held_out_loss"])]
        if judged_by == "held_out_loss":
            return [{**row, "error": row["held_out_loss"]} for row in evaluated]
        return [{**row, "error": 1 - row["held_out_accuracy"]} for row in evaluated]

    def packed(self) -> list[Row]:
        """Return the rows to keep: of a sweep the first, first evaluated, best and last."""
        if self.job.final:
            return self.rows
        evaluated = [row for row in self.rows if math.isfinite(row["held_out_loss"])]
        kept = [self.rows[0], self.rows[-1], *evaluated[:1]]
        if evaluated:
            kept.append(min(evaluated, key=lambda row: row["held_out_loss"]))
        return [row for row in self.rows if any(row is one for one in kept)]


def is_diverged(loss: float, first: float) -> bool:
    return not (math.isfinite(loss) and loss <= DIVERGED * first)


class Table:
    """A run's csv while it is trained: every row is in the file as soon as it is added.

    Args:
        path: of the finished run; until :meth:`rename` the file has the suffix ".partial".
        first: steps that count; later rows, of a life that was cut off, are dropped.

    Raises:
        ValueError: rows are missing that the checkpoint says were made.
    """

    def __init__(self, path: Path, first: int) -> None:
        self.path, self.partial = path, path.with_suffix(".partial")
        found = read_rows(self.partial) if self.partial.exists() else []
        self.rows = [row for row in found if row["step"] <= first]
        if len(self.rows) != first:
            raise ValueError(
                f"{self.partial}: {len(self.rows)} rows, but the save has {first} steps"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.partial.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="", lineterminator="\n")
        self._writer.writeheader()
        for row in self.rows:
            self._write(row)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(row)

    def close(self) -> None:
        self._file.close()

    def rename(self) -> None:
        """Say that the run is finished."""
        self.partial.rename(self.path)

    def _write(self, row: Row) -> None:
        self._writer.writerow({key: _cell(value) for key, value in row.items()})
        self._file.flush()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def read_rows(path: Path) -> list[Row]:
    """Return the rows that were written whole."""
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_numbers(row) for row in csv.DictReader(lines) if None not in row.values()]


def _numbers(row: Mapping[str, str]) -> Row:
    return {
        key: cell if key == "kind" else float(cell or "nan")
        for key, cell in row.items()
        if key not in KEYS
    }


def warmed(rows: list[Row]) -> list[Row]:
    """Return the rows with seconds in which a cold step counts as the mean of the others."""
    others = [row["step_seconds"] for row in rows if row.get("cold") != 1]
    if len(others) in (0, len(rows)):
        return rows
    mean, total, found = fmean(others), 0.0, []
    for row in rows:
        spent = mean if row["cold"] == 1 else row["step_seconds"]
        total += spent
        found.append({**row, "seconds": total, "step_seconds": spent})
    return found


def finished(out: Path, task: str) -> dict[str, Run]:
    """Return the finished runs of a task by their jobs' names."""
    found = {run.job.name: run for run in read_packed(out / f"{task}.csv")}
    for path in (out / "runs" / task).glob("*.csv"):
        if match := re.fullmatch(r"([\w.]+)_lr([^_]+)_seed(\d+)(_final)?", path.stem):
            job = Job(task, match[1], float(match[2]), int(match[3]), final=bool(match[4]))
            found[job.name] = Run(job, warmed(read_rows(path)))
    return found


def read_all(out: Path) -> list[Run]:
    """Return every finished run of a results folder, packed or not."""
    tasks = {path.stem for path in out.glob("*.csv")}
    tasks |= {path.name for path in (out / "runs").glob("*")}
    runs = [run for task in tasks for run in finished(out, task).values()]
    return sorted(runs, key=lambda run: (run.job.task, run.job.method, run.job.rate, run.job.name))


def read_packed(path: Path) -> Iterator[Run]:
    """Yield the runs of a packed csv; none if it is another kind of csv."""
    if not path.exists():
        return
    with open(path, newline="") as file:
        table = csv.DictReader(file)
        if (table.fieldnames or [])[: len(KEYS)] != KEYS:
            return
        runs: list[Run] = []
        for row in table:
            if row["method"]:
                rate, seed, final = float(row["rate"]), int(row["seed"]), row["final"] == "1"
                runs.append(Run(Job(path.stem, row["method"], rate, seed, final=final), []))
            runs[-1].rows.append(_numbers(row))
    yield from runs


def pack(out: Path) -> None:
    """Write all finished runs to a csv for each task, and their settings to one file."""
    by_task: dict[str, list[Run]] = {}
    for run in read_all(out):
        by_task.setdefault(run.job.task, []).append(run)
    for task, runs in by_task.items():
        _write_packed(out / f"{task}.csv", runs)
    if known := read_settings(out):
        (out / "settings.json").write_text(json.dumps(known, indent=0) + "\n")


def _write_packed(path: Path, runs: Sequence[Run]) -> None:
    made = {key for run in runs for row in run.rows for key, x in row.items() if _cell(x)}
    columns = [name for name in PACKED_COLUMNS if name in made or name in COLUMNS[:5]]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(
            file, [*KEYS, *columns], restval="", extrasaction="ignore", lineterminator="\n"
        )
        table.writeheader()
        for run in runs:
            job = run.job
            keys: Row = {"method": job.method, "rate": f"{job.rate:g}"}
            keys |= {"seed": job.seed, "final": int(job.final)}
            for row in run.packed():
                table.writerow(keys | {key: _cell(value) for key, value in row.items()})
                keys = {}


def read_settings(out: Path) -> dict[str, dict[str, Row]]:
    """Return the settings of the runs of a folder: task to method to settings."""
    path = out / "settings.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for path in sorted((out / "runs").glob("*/*.json")):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    return found


def check_settings(out: Path, task: str, method: str, settings: Row) -> None:
    """Keep runs of other settings out of the same table.

    A key of K-FAC's config that is newer than the runs had its default in them.

    Raises:
        ValueError: the folder has runs of this method that were made with other settings.
    """
    settings = json.loads(json.dumps(settings))
    before = read_settings(out).get(task, {}).get(method, settings)
    if (defaults := "kfac with defaults") in before and defaults in settings:
        before = {**before, defaults: _filled(before[defaults], settings[defaults])}
    has_runs = any(run.job.method == method for run in finished(out, task).values())
    if before != settings and has_runs:
        keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        raise ValueError(
            f"{out}: its runs of {task} by {method} were made with other settings "
            f"({', '.join(keys)}); use another --out, or remove them from {task}.csv and "
            f"runs/{task} to make them again"
        )
    path = out / "runs" / task / f"{method}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")


def _filled(before: Any, now: Any) -> Any:
    """Return ``before`` with the keys that only ``now`` has, at any depth."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before
    return {**now, **{key: _filled(value, now.get(key)) for key, value in before.items()}}


def best_rate(errors: Mapping[float, float]) -> float | None:
    """Return the rate with the lowest error; None if all are infinite."""
    best = min(sorted(errors), key=errors.__getitem__, default=None)
    return best if best is not None and math.isfinite(errors[best]) else None


def next_rate(
    errors: Mapping[float, float], started_with: int, extensions: int = EXTENSIONS
) -> float | None:
    """Return the rate to try next if the best one is at an edge; below all if all diverged."""
    if len(errors) - started_with >= extensions:
        return None
    low, high, best = min(errors), max(errors), best_rate(errors)
    if best is None or best == low:
        return low / 2
    return high * 2 if best == high else None
