"""A run's csv: a row a step, in the file as soon as it is made."""

import csv
import json
from pathlib import Path

from benchmarks.convergence.results import is_diverged
from benchmarks.gpu_lm.plan import Job

COLUMNS = ("step", "seconds", "step_seconds", "loss", "held_out_loss", "memory_mb", "cold")
COLD = 2
"""First steps of each life of a run, which compile."""


def rows_of(path: Path) -> list[dict[str, str]]:
    """Rows that were written whole."""
    if not path.exists():
        return []
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in csv.DictReader(lines) if None not in row.values()]


def is_finished(rows: list[dict[str, str]], steps: int) -> bool:
    return bool(rows) and (
        int(rows[-1]["step"]) == steps or is_diverged(*(float(rows[i]["loss"]) for i in (-1, 0)))
    )


class Table:
    """A run's csv, from step ``first`` on: later rows of a life that was cut off are dropped."""

    def __init__(self, path: Path, first: int) -> None:
        self.rows = [row for row in rows_of(path) if int(row["step"]) <= first]
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        partial.rename(path)
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="", lineterminator="\n")

    def add(self, **row: float) -> None:
        self.rows.append({name: f"{value:.7g}" for name, value in row.items()})
        self._writer.writerow(self.rows[-1])
        self._file.flush()


def is_done(out: Path, job: Job, fingerprint: str, steps: int) -> bool:
    """Whether it is finished with these settings on this corpus."""
    path = out / "runs" / f"{job.name}.csv"
    known = path.with_suffix(".json")
    same = known.exists() and json.loads(known.read_text())["fingerprint"] == fingerprint
    return same and is_finished(rows_of(path), steps)
