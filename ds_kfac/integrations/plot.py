"""``python -m ds_kfac plot``: loss, seconds, refreshes and bytes, from the logs that a run has written anyway."""

import argparse
import csv
import importlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[float, float]]]
"""Name -> (step or sample, value)."""
PANELS = {
    "loss": "loss", "seconds": "seconds|elapsed_time",
    "refreshes, of rank 0": "refreshes", "bytes sent by rank 0": "sent_bytes",
}  # fmt: skip
"""Title -> what is in the names of its lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder with DeepSpeed's csv or tensorboard logs, or trainer_state.json")
    parser.add_argument("--out", type=Path, help="image to write; default: kfac.png in that folder")


def run(arguments: argparse.Namespace) -> str:
    """The file that was written.

    Raises:
        ValueError: no logs there, a wrong line in one, or matplotlib is missing.
    """
    series = read(arguments.run)
    if not series:
        raise ValueError(
            f"{arguments.run}: no csv_monitor, tensorboard or trainer_state.json logs; enable one of them in the "
            'DeepSpeed config, such as "csv_monitor": {"enabled": true, "output_path": "runs", "job_name": "kfac"}'
        )
    return f"wrote {draw(series, arguments.out or arguments.run / 'kfac.png')}"


def read(folder: Path) -> Series:
    """All numbers logged below a folder, by name and in order."""
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for path in sorted(folder.rglob("*.csv")):
        for number, row in enumerate(csv.reader(_text(path).splitlines()), 1):
            if len(row) == 2 and row[0] != "step":  # a resumed run writes its heading again
                try:
                    found[path.stem][float(row[0])] = float(row[1])
                except ValueError:
                    what = f"got {row}; must be two numbers: mend the line, or take it out"
                    raise ValueError(f"{path}, line {number}: {what}") from None
    for path in sorted(folder.rglob("trainer_state.json")):
        for entry in _history(path):
            for name, value in entry.items():
                if isinstance(value, (int, float)) and name != "step":
                    found[name][entry["step"]] = value
    for directory in sorted({path.parent for path in folder.rglob("events.out.tfevents*")}):
        reader = _module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(directory))
        reader.Reload()
        for name in reader.Tags()["scalars"]:
            found[name] |= {event.step: event.value for event in reader.Scalars(name)}
    return {name: sorted(values.items()) for name, values in found.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}; take it out of the folder, or mend it") from None


def _history(path: Path) -> list[dict[str, Any]]:
    """Of the Trainer's state."""
    try:
        history = json.loads(_text(path))["log_history"]
        if all(isinstance(entry["step"], int) for entry in history):
            return history
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    what = 'its "log_history" is no list of objects with a "step" each'
    raise ValueError(f"{path}: {what}; take the file out, or mend it")


def draw(series: Series, path: Path) -> Path:
    """A panel for each of :data:`PANELS`; one without a line says so."""
    _module("matplotlib").use("Agg")
    figure, axes = _module("matplotlib.pyplot").subplots(2, 2, figsize=(12, 8), layout="constrained")
    for axis, (title, pattern) in zip(axes.flat, PANELS.items(), strict=True):
        lines = {name: points for name, points in series.items() if re.search(pattern, name)}
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1, marker=".", markersize=3)
        axis.set(title=title if lines else f"{title}: not in these logs", xlabel="step or sample, as logged")
        axis.grid(alpha=0.3)
        if lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ValueError(f"{problem}; pip install ds_kfac[examples]") from problem
