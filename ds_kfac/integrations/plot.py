"""``python -m ds_kfac plot``: a picture for each question, from the logs that a run has written anyway."""

import argparse
import csv
import importlib
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Points = list[tuple[float, float]]
Series = dict[str, Points]
"""Name -> (step or sample, value)."""


class Question(NamedTuple):
    """What a picture answers.

    Attributes:
        y: what its axis has.
        names: regex of the names of its lines; what follows it is the line's label, if anything does.
        missing: how such lines come into the logs.
        grows: whether they are sums over all steps so far, of which one step's part is shown.
        whole: whether a line's label is its whole name.
    """

    y: str
    names: str
    missing: str
    grows: bool = False
    whole: bool = False


COUNTERS = 'a monitor such as "csv_monitor": {"enabled": true} in the DeepSpeed config'
HEALTH = (
    "not_finite", "unpreconditioned", "unused", "refresh_failures", "left_out", "limited", "empty", "skipped_steps",
    "parted",
)  # fmt: skip
"""How the counters of what went wrong begin."""
QUESTIONS = {
    "loss": Question("loss", r"loss", 'such as "csv_monitor": {"enabled": true}', whole=True),
    "seconds": Question(
        "seconds a step, rank 0", r"(?:(?i:kfac)_seconds|elapsed_time_ms)_", '"wall_clock_breakdown": true for the '
        "model's, engine.kfac.metrics.timings = True for K-FAC's stages", grows=True),
    "bytes": Question("bytes sent a step, rank 0", r"(?i:kfac)_sent_bytes_?", COUNTERS, grows=True),
    "health": Question(
        "so far; layers of the last step", r"(?i:kfac)_(?=" + "|".join(HEALTH) + r")",
        f"{COUNTERS}; a framework's logs have those that are not 0"),
}  # fmt: skip
"""Name of the picture -> what it shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder with DeepSpeed's csv or tensorboard logs or trainer_state.json, "
                        "or one such file")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for the pictures kfac_loss.png, kfac_seconds.png, .. "
                        "default: that of the logs")  # fmt: skip


def run(arguments: argparse.Namespace) -> str:
    """The files that were written, and what is not in the logs.

    Raises:
        ValueError: no logs there, a wrong line in one, or matplotlib is missing.
    """
    source: Path = arguments.run
    series = read(source)
    if not series:
        raise ValueError(
            f"{source}: no csv_monitor, tensorboard or trainer_state.json logs; enable one of them in the "
            'DeepSpeed config, such as "csv_monitor": {"enabled": true, "output_path": "runs", "job_name": "kfac"}'
        )
    folder = arguments.out or (source if source.is_dir() else source.parent)
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for name, question in QUESTIONS.items():
        found = lines(series, question)
        path = folder / f"kfac_{name}.png"
        if not found:
            said.append(f"no {name} in these logs: {question.missing}")
        elif not any(value for points in found.values() for _, value in points):
            said.append(f"{name}: always 0: {', '.join(found)}")
        else:
            said.append(f"wrote {draw(found, question, path)}")
    return "\n".join(said)


def read(source: Path) -> Series:
    """All numbers logged below a folder, or in a file, by name and in order. What a run has logged twice, to csv and to
    tensorboard, has one name."""
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for path in [source] if source.is_file() else sorted(source.rglob("*")):
        for name, x, value in _numbers(path, alone=path == source):
            found[name.replace("/", "_")][x] = value
    return {name: sorted(values.items()) for name, values in found.items()}


def _numbers(path: Path, *, alone: bool) -> Iterator[tuple[str, float, float]]:
    """(name, step or sample, value) of all that a file has logged. ``alone``: it was named itself, so it has to."""
    if path.suffix == ".csv":
        for number, row in enumerate(csv.reader(_text(path).splitlines()), 1):
            if len(row) == 2 and row[0] != "step":  # a resumed run writes its heading again
                try:
                    yield path.stem, float(row[0]), float(row[1])
                except ValueError:
                    what = f"got {row}; must be two numbers: mend the line, or take it out"
                    raise ValueError(f"{path}, line {number}: {what}") from None
    elif path.name == "trainer_state.json" or (alone and path.suffix == ".json"):
        for entry in _history(path):
            for name, value in entry.items():
                if isinstance(value, (int, float)) and name != "step":
                    yield name, entry["step"], value
    elif path.name.startswith("events.out.tfevents"):
        reader = _module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(path))
        reader.Reload()
        for name in reader.Tags()["scalars"]:
            yield from ((name, event.step, event.value) for event in reader.Scalars(name))
    elif alone:
        raise ValueError(f"{path}: not a trainer_state.json, .csv or events.out.tfevents file; name the run's folder")


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


def lines(series: Series, question: Question) -> Series:
    """Those of a picture, in its axis: seconds, not milliseconds; of a counter that only grows what a step adds."""
    steps = dict(next((points for name, points in series.items() if name.lower().endswith("kfac_steps")), []))
    found = {}
    for name, points in series.items():
        match = re.search(question.names, name)
        if match is None:
            continue
        label = name if question.whole else name[match.end() :] or "all"
        if "elapsed_time_ms" in name:
            label, points = f"{label} (DeepSpeed's)", [(x, value / 1e3) for x, value in points]
        elif question.grows:
            points = per_step(points, steps)
        if points:
            found[label] = points
    return found


def per_step(points: Points, steps: dict[float, float]) -> Points:
    """Of a sum over all steps so far what one step has added, in the mean since the last point.

    Args:
        steps: place -> steps so far, where places are samples; else they are steps themselves.
    """
    before = [(0.0, 0.0, 0.0)] if steps else []  # a resumed run's counters begin at zero, its steps do not
    counted = before + [(x, steps.get(x, x), value) for x, value in points]
    pairs = (pair for pair in pairwise(counted) if pair[1][1] > pair[0][1] and pair[1][2] >= pair[0][2])
    return [(x, (value - last) / (now - past)) for (_, past, last), (x, now, value) in pairs]


def draw(series: Series, question: Question, path: Path) -> Path:
    """A line for each series; counters that stayed at zero are named in the title."""
    _module("matplotlib").use("Agg")
    figure, axis = _module("matplotlib.pyplot").subplots(figsize=(8, 4.5), layout="constrained")
    quiet = [name for name, points in series.items() if not any(value for _, value in points)]
    for name, points in series.items():
        if name not in quiet:
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1, marker=".", markersize=3)
    if quiet:
        axis.set_title(textwrap.fill(f"always 0: {', '.join(quiet)}", 100), fontsize=8)
    axis.set(xlabel="step or sample, as logged", ylabel=question.y, yscale="log" if question.grows else "linear")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ValueError(f"{problem}; pip install ds_kfac[examples]") from problem
