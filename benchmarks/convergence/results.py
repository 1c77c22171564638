"""Runs of the convergence benchmark on disk: a csv is a finished run, whatever else lies there is not.

<out>/<task>/<method>_lr<rate>_seed<seed>.csv          a run of the sweep: columns COLUMNS, a row a step; its held-out
                                                       loss is of the validation part
<out>/<task>/<method>_lr<rate>_seed<seed>_final.csv    one of a race, timed step by step against the others; of the
                                                       test part
<out>/<task>/<method>.json                             the settings of all those runs
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ["step", "seconds", "loss", "held_out_loss", "step_seconds", "held_out_accuracy"]
REWARD_COLUMNS = [*COLUMNS, "samples", "entropy", "kl"]
"""Of tasks that learn from rewards, whose losses are shares of wrong answers."""
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

    def path(self, out: Path) -> Path:
        return out / self.task / f"{self.method}_lr{self.rate:g}_seed{self.seed}{'_final' if self.final else ''}.csv"


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


def is_diverged(loss: float, first: float) -> bool:
    return not (math.isfinite(loss) and loss <= DIVERGED * first)


def write(path: Path, rows: Iterable[Mapping[str, object]], columns: Sequence[str] = COLUMNS) -> None:
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
    with open(job.path(out), newline="") as file:
        rows = [{key: float(cell or "nan") for key, cell in row.items()} for row in csv.DictReader(file)]
    return Run(job, rows)


def read_all(out: Path) -> list[Run]:
    """Every finished run below a results folder."""
    runs = []
    for path in sorted(out.glob("*/*.csv")):
        if match := re.fullmatch(r"([\w.]+)_lr([^_]+)_seed(\d+)(_final)?", path.stem):
            job = Job(path.parent.name, match[1], float(match[2]), int(match[3]), final=bool(match[4]))
            runs.append(read(job, out))
    return runs


def check_settings(out: Path, task: str, method: str, settings: dict) -> None:
    """Keep runs of other settings out of the same table. A key of ``kfac`` that is newer than the runs had
    its default in them; set to something else it is in "config at rate 1", too.

    Raises:
        ValueError: the folder has runs of this method that were made with other settings.
    """
    path = out / task / f"{method}.json"
    settings = json.loads(json.dumps(settings))
    before = json.loads(path.read_text()) if path.exists() else settings
    if (defaults := "kfac with defaults") in before and defaults in settings:
        before = {**before, defaults: filled(before[defaults], settings[defaults])}
    if before != settings and any(path.parent.glob(f"{method}_lr*.csv")):
        keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
        raise ValueError(
            f"{path}: these runs were made with other settings ({', '.join(keys)}); use another --out, or remove "
            f"{path.parent / method}_lr*.csv to make them again"
        )
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


def next_rate(losses: Mapping[float, float], started_with: int, extensions: int = EXTENSIONS) -> float | None:
    """The rate to try next if the best is at an edge, two apart; below all if all diverged; None when done."""
    if len(losses) - started_with >= extensions:
        return None
    low, high, best = min(losses), max(losses), best_rate(losses)
    if best is None or best == low:
        return low / 2
    return high * 2 if best == high else None
