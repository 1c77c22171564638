"""``python -m ds_kfac plot``: draw a page with four panels from the logs that a run has written."""

import argparse
import csv
import importlib
import json
import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Points = list[tuple[float, float]]
Series = dict[str, Points]
"""Name of a logged number -> list of (step or sample, value)."""


class Question(NamedTuple):
    """The content of one panel of the page.

    Attributes:
        y: label of the y axis.
        names: regex that finds the panel's lines by their names in the logs. The rest of a name
            after the match is the line's label.
        missing: how to get these numbers into the logs.
        grows: whether the logged numbers are sums over all steps so far. If they are, the panel
            shows the amount per step.
        whole: whether a line's label is its whole name.
    """

    y: str
    names: str
    missing: str
    grows: bool = False
    whole: bool = False


COUNTERS = 'enable a monitor, such as "csv_monitor": {"enabled": true} in the DeepSpeed config'
HEALTH = (
    "not_finite",
    "unpreconditioned",
    "unused",
    "refresh_failures",
    "left_out",
    "limited",
    "empty",
    "skipped_steps",
)
"""Prefixes of the names of failure counters."""
QUESTIONS = {
    "loss": Question(
        "loss", r"loss", 'enable a monitor, such as "csv_monitor": {"enabled": true}', whole=True
    ),
    "seconds": Question(
        "",
        r"(?:(?i:kfac)_seconds|elapsed_time_ms)_",
        'to log the times of the model, set "wall_clock_breakdown": true in the DeepSpeed config; '
        "to log those of K-FAC's stages, set engine.kfac.metrics.timings = True",
        grows=True,
    ),
    "step to weight": Question(
        "size of a step / size of the weights",
        r"(?i:kfac)_(?=step_to_weight$|nu$)",
        f"{COUNTERS}, or use a framework's logs. With other optimizers than KFACAdamW, the logs "
        "have kl-clip's factor nu instead",
    ),
    "failures": Question(
        "failures so far\n(unpreconditioned, unused: in the last step)",
        r"(?i:kfac)_(?=" + "|".join(HEALTH) + r")",
        f"{COUNTERS}; a framework's logs have only the counters that are not 0",
    ),
}
"""Name of a panel -> its content."""
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which is safe for colour-blind readers."""
MODEL, OPTIMIZER, CAPTURE = "forward and backward", "optimizer", "capture"
STAGES = (CAPTURE, "reduce", "refresh", "relayout", "precondition")
"""K-FAC's stages, named as in ``ds_kfac.metrics``. All but the capture run inside DeepSpeed's
step."""
OF_DEEPSPEED = " (DeepSpeed's)"
FORWARD = f"forward{OF_DEEPSPEED}"
PAGE = "kfac.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        help="a run's folder, which holds csv or tensorboard logs of DeepSpeed or a "
        "trainer_state.json; or one of these files",
    )
    parser.add_argument(
        "--out", type=Path, help=f"folder for the page, {PAGE}; default: the folder of the logs"
    )


def run(arguments: argparse.Namespace) -> str:
    """Draw the page. Return a text with the page's path and what is missing in the logs.

    Raises:
        ValueError: there are no logs, a log has a wrong line, or matplotlib is missing.
    """
    source: Path = arguments.run
    series = read(source)
    if not series:
        raise ValueError(
            f"{source}: no csv_monitor, tensorboard or trainer_state.json logs; enable a monitor "
            'in the DeepSpeed config, such as "csv_monitor": {"enabled": true, "output_path": '
            '"runs", "job_name": "kfac"}'
        )
    folder = arguments.out or (source if source.is_dir() else source.parent)
    folder.mkdir(parents=True, exist_ok=True)
    panels = {name: lines(series, question) for name, question in QUESTIONS.items()}
    missing = [
        f"no {name} in these logs: {QUESTIONS[name].missing}"
        for name, found in panels.items()
        if not found
    ]
    if len(missing) == len(panels):
        return "\n".join(missing)
    return "\n".join([f"wrote {draw(panels, folder / PAGE)}", *missing])


def read(source: Path) -> Series:
    """Return all numbers that were logged to a file, or to a folder and its subfolders, as a dict
    from name to sorted points. A number that was logged to both csv and tensorboard is returned
    once."""
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for path in [source] if source.is_file() else sorted(source.rglob("*")):
        for name, x, value in _numbers(path, alone=path == source):
            found[name.replace("/", "_")][x] = value
    return {name: sorted(values.items()) for name, values in found.items()}


def _numbers(path: Path, *, alone: bool) -> Iterator[tuple[str, float, float]]:
    """Yield (name, step or sample, value) for each number in a log file. ``alone``: True if the
    user named this file itself, so that it must be a log."""
    if path.suffix == ".csv":
        for number, row in enumerate(csv.reader(_text(path).splitlines()), 1):
            if len(row) == 2 and row[0] != "step":  # a resumed run writes its heading again
                try:
                    yield path.stem, float(row[0]), float(row[1])
                except ValueError:
                    what = f"got {row}; must be two numbers: correct the line, or remove it"
                    raise ValueError(f"{path}, line {number}: {what}") from None
    elif path.name == "trainer_state.json" or (alone and path.suffix == ".json"):
        for entry in _history(path):
            for name, value in entry.items():
                if isinstance(value, (int, float)) and name != "step":
                    yield name, entry["step"], value
    elif path.name.startswith("events.out.tfevents"):
        reader = _module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
            str(path)
        )
        reader.Reload()
        for name in reader.Tags()["scalars"]:
            yield from ((name, event.step, event.value) for event in reader.Scalars(name))
    elif alone:
        raise ValueError(
            f"{path}: not a trainer_state.json, .csv or events.out.tfevents file; pass one of "
            "these files, or the run's folder"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}; correct the file, or move it elsewhere") from None


def _history(path: Path) -> list[dict[str, Any]]:
    """Return the ``log_history`` of a Trainer's state file."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        history = json.loads(_text(path))["log_history"]
        if all(isinstance(entry["step"], int) for entry in history):
            return history
    what = 'its "log_history" is not a list of objects that each have a "step"'
    raise ValueError(f"{path}: {what}; correct the file, or move it elsewhere")


def lines(series: Series, question: Question) -> Series:
    """Return the lines of a panel, in the unit of its axis. Milliseconds become seconds, and sums
    over all steps become the amount per step."""
    steps = dict(
        next((points for name, points in series.items() if name.lower().endswith("kfac_steps")), [])
    )
    found = {}
    for name, points in series.items():
        match = re.search(question.names, name)
        if match is None:
            continue
        label = name if question.whole else name[match.end() :] or "all"
        if "elapsed_time_ms" in name:
            label = f"{label}{OF_DEEPSPEED}"
            points = [(x, value / 1e3) for x, value in points]
        elif question.grows:
            points = per_step(points, steps)
        if points:
            found[label] = points
    return found


def per_step(points: Points, steps: dict[float, float]) -> Points:
    """Convert a sum over all steps so far to the mean amount per step since the previous point.

    Args:
        steps: dict from the number of samples on the x axis to the number of steps at that point.
            Empty if the x axis counts steps.
    """
    # after a resume, counters begin at zero again, but steps do not
    before = [(0.0, 0.0, 0.0)] if steps else []
    counted = before + [(x, steps.get(x, x), value) for x, value in points]
    pairs = (
        pair for pair in pairwise(counted) if pair[1][1] > pair[0][1] and pair[1][2] >= pair[0][2]
    )
    return [(x, (value - last) / (now - past)) for (_, past, last), (x, now, value) in pairs]


def parts_of_step(found: Series) -> tuple[dict[str, float], float | None]:
    """Return a dict from part of a step to its mean seconds per step, and K-FAC's share of a step's
    time.

    The times that DeepSpeed logs include K-FAC's stages. The stages are subtracted from them, so
    that no time is counted twice. The share is None if the logs lack DeepSpeed's times or the
    stages' times.

    Args:
        found: the lines of the panel "seconds". This function leaves out the first point of each
            line, because it includes compilation at the start.
    """
    values = {name: [y for _, y in points[len(points) > 1 :]] for name, points in found.items()}
    mean = {name: statistics.fmean(own) for name, own in values.items()}
    if FORWARD in values:  # a median, because evaluations between steps also count as forward
        mean[FORWARD] = statistics.median(values[FORWARD])
    stages = {stage: mean[stage] for stage in STAGES if stage in mean}
    forward, backward, step = (
        mean.get(name) for name in (FORWARD, f"backward{OF_DEEPSPEED}", f"step{OF_DEEPSPEED}")
    )
    if forward is None or backward is None or step is None:
        return stages or mean, None
    inside = sum(seconds for stage, seconds in stages.items() if stage != CAPTURE)
    own = {MODEL: forward + backward - stages.get(CAPTURE, 0.0), OPTIMIZER: step - inside}
    share = sum(stages.values()) / (forward + backward + step) if stages else None
    return {**{name: max(0.0, seconds) for name, seconds in own.items()}, **stages}, share


def draw(panels: Mapping[str, Series], path: Path) -> Path:
    """Draw the page, with a panel for each question. A panel's title states the result, or what the
    logs lack. Return the page's path."""
    _module("matplotlib").use("Agg")
    figure, axes = _module("matplotlib.pyplot").subplots(
        2, 2, figsize=(11, 7.5), layout="constrained"
    )
    for axis, (name, found) in zip(axes.flat, panels.items(), strict=True):
        question = QUESTIONS[name]
        active = {
            label: points for label, points in found.items() if any(value for _, value in points)
        }
        if name == "seconds" and active:
            _draw_parts(axis, *parts_of_step(active))
        elif not active:
            quiet = name == "failures" and found
            if quiet:
                text = f"always 0: {', '.join(found)}"
            else:
                text = f"not in these logs: {question.missing}"
            axis.set_title("nothing has failed" if quiet else f"no {name}", loc="left", fontsize=11)
            axis.text(
                0.5,
                0.5,
                textwrap.fill(text, 50),
                ha="center",
                va="center",
                fontsize=9,
                color="0.35",
            )
            axis.set_axis_off()
        else:
            _draw_lines(axis, name, active, [label for label in found if label not in active])
    figure.savefig(path, dpi=120)
    return path


def _draw_lines(axis: Any, name: str, found: Series, quiet: Sequence[str]) -> None:
    """Draw the lines of a panel. ``quiet``: names of lines that stayed at zero."""
    several = max(map(len, found.values())) > 1
    # leave out lines with one point, such as a run's mean, if another line has several
    found = {label: points for label, points in found.items() if len(points) > 1 or not several}
    for index, (label, points) in enumerate(found.items()):
        color = COLORS[index % len(COLORS)]
        axis.plot(
            *zip(*points, strict=True),
            label=label,
            color=color,
            linewidth=1.2,
            marker=".",
            markersize=3,
        )
    ends = ", ".join(f"{label} {points[-1][1]:.4g}" for label, points in list(found.items())[:2])
    more = f"; always 0: {len(quiet)} others" if quiet else ""
    axis.set_title(
        textwrap.fill(f"{'failures' if name == 'failures' else 'at the end'}: {ends}{more}", 70),
        loc="left",
        fontsize=11,
    )
    axis.set(xlabel="step or sample, as logged", ylabel=QUESTIONS[name].y)
    if name != "loss":
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_parts(axis: Any, parts: Mapping[str, float], share: float | None) -> None:
    total = sum(parts.values())
    names = list(parts)[::-1]
    colors = [COLORS[0] if name in STAGES else "0.6" for name in names]
    axis.barh(names, [parts[name] for name in names], color=colors)
    for row, name in enumerate(names):
        of_step = f", {parts[name] / total:.0%}" if share is not None else ""
        axis.text(parts[name], row, f" {parts[name]:.3g} s{of_step}", va="center", fontsize=9)
    if share is not None:
        title = f"K-FAC takes {share:.0%} of a step"
    else:
        title = "K-FAC's share is not known: "
    lacks = "the model's times" if all(name in STAGES for name in names) else "K-FAC's times"
    axis.set_title(
        title if share is not None else f"{title}{lacks} are not logged", loc="left", fontsize=11
    )
    axis.set(xlabel="seconds a step, rank 0", xlim=(0, 1.3 * max(parts.values())))
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ValueError(f"{problem}; pip install ds_kfac[examples]") from problem
