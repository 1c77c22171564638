"""Plots of training runs: held-out loss against steps, and steps to one loss against the batch."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.runs import Run
from benchmarks.convergence.tasks import TASKS
from benchmarks.pictures import save

OURS, CURVE = "kfacadamw", "batches.png"
FAMILIES = {
    "kfacadamw_unrotated": ("KFACAdamW without curvature", "#E69F00", "s"),
    "kfacadamw": ("KFACAdamW", "#0072B2", "o"),
    "kfac_adamw": ("K-FAC into AdamW", "#56B4E9", "P"),
    "kfac_nesterov": ("K-FAC into SGD with momentum", "#F0E442", "X"),
    "kfac_relative": ("the same, relative damping", "#56B4E9", "P"),
    "kfac_cnn": ("K-FAC into SGD", "#F0E442", "X"),
    "kfac_kaisa": ("K-FAC into SGD, KAISA's settings", "#56B4E9", "P"),
    "adamw": ("AdamW", "#000000", "^"),
    "muon": ("Muon", "#D55E00", "D"),
    "soap": ("SOAP", "#009E73", "v"),
    "shampoo": ("Shampoo", "#CC79A7", "<"),
    "sgd": ("SGD with momentum", "#999999", ">"),
}
"""First letters of a method -> its name, colour and marker. The longest that fits counts.

The colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""
FRONT = ("gpt_small", ("adamw", "muon", "kfacadamw_unrotated", "kfacadamw"))
"""Task and methods of README's plot."""
LINES = ("-", "--", ":", "-.")
"""Line styles of the methods of one family in a plot."""


def draw(
    best: Mapping[tuple[str, str], dict[int, Run]], out: Path, parts: Mapping[tuple[str, str], Any]
) -> list[Path]:
    """Draw loss against steps, a file for every task; return the files.

    Args:
        best: (task, method) -> seed -> run.
        parts: (task, method) -> part of the base method's steps to its final loss.
    """
    files = []
    for task in dict.fromkeys(task for task, _ in best):
        ours = {m: [*found.values()] for (of, m), found in best.items() if of == task and found}
        if not ours:
            continue
        part, base = parts.get((task, OURS)), name_of(base_of(task))
        title = f"{task}: each method at its best rate"
        if isinstance(part, float):
            title = f"{task}: KFACAdamW is at {base}'s final loss in {part:.0%} of its steps"
        files.append(_race(ours, f"{title} (thin: seeds)", out / f"{task}_loss.png"))
        front = {method: ours[method] for method in FRONT[1] if method in ours}
        if task == FRONT[0] and len(front) == len(FRONT[1]) and isinstance(part, float):
            end = f"is at AdamW's final loss in {part:.0%} of its steps"
            title = f"A byte GPT of 0.9 M: KFACAdamW {end}"
            files.append(_race(front, title, out / "front.png"))
    return files


def base_of(task: str) -> str:
    return TASKS[task].base if task in TASKS else "adamw"


def judged_by(task: str) -> str:
    return TASKS[task].judged_by if task in TASKS else "held_out_loss"


def name_of(method: str) -> str:
    """Return the method's name as people say it."""
    family = _family(method)
    return FAMILIES[family][0] + method.removeprefix(family).replace("_", " ")


def in_order(methods: Iterable[str]) -> list[str]:
    """Sort as in METHODS; methods that are no longer there come last."""
    known = {method: place for place, method in enumerate(METHODS)}
    return sorted(methods, key=lambda method: (known.get(method, len(known)), method))


def styles(methods: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return method -> how it is drawn, with its name as label."""
    found: dict[str, dict[str, str]] = {}
    used: Counter[str] = Counter()
    for method in in_order(methods):
        family = _family(method)
        _, color, marker = FAMILIES[family]
        line = LINES[used[family] % len(LINES)]
        found[method] = {"color": color, "marker": marker, "ls": line, "label": name_of(method)}
        used[family] += 1
    return found


def _family(method: str) -> str:
    return max((name for name in FAMILIES if method.startswith(name)), key=len, default="sgd")


def _race(ours: Mapping[str, Sequence[Run]], title: str, path: Path) -> Path:
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for method, style in styles(ours).items():
        _curves(axis, ours[method], style)
    task = next(iter(ours.values()))[0].job.task
    unit = TASKS[task].unit if task in TASKS else "nats per byte"
    axis.set(xlabel="step", ylabel=f"held-out loss [{unit}]")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    ends = [run.final for found in ours.values() for run in found if math.isfinite(run.final)]
    if ends:
        axis.set_ylim(min(ends) - 0.05, min(min(ends) + 2, axis.get_ylim()[1]))
    axis.legend(fontsize=8)
    return save(figure, path)


def _curves(axis: Any, found: Sequence[Run], style: dict[str, str]) -> None:
    """Draw every seed, and the mean over the evaluations that all seeds have."""
    curves = [run.curve() for run in found]
    for curve in curves:
        steps, losses = ([row[key] for row in curve] for key in ("step", "held_out_loss"))
        axis.plot(steps, losses, color=style["color"], lw=0.6, alpha=0.5)
    points = list(zip(*curves, strict=False))
    means = [
        [statistics.fmean(row[key] for row in point) for point in points]
        for key in ("step", "held_out_loss")
    ]
    label = f"{style['label']}, lr {found[0].job.rate:g}"
    axis.plot(*means, lw=2, ms=4, **{**style, "label": label})


def draw_batches(steps: Mapping[str, dict[int, list[float]]], out: Path) -> Path | None:
    """Draw steps to one loss against the bytes in a step; perfect scaling is a slope of -1."""
    if not steps:
        return None
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for method, style in styles(steps).items():
        found = steps[method]
        axis.plot(list(found), [statistics.fmean(seeds) for seeds in found.values()], **style)
        for size, seeds in found.items():
            sizes = [size] * len(seeds)
            axis.plot(sizes, seeds, color=style["color"], marker=".", ls="", alpha=0.5)
    axis.set(xscale="log", yscale="log", xlabel="bytes a step")
    axis.set(ylabel="steps to the same held-out loss")
    sizes = sorted({size for found in steps.values() for size in found})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return save(figure, out / CURVE)
