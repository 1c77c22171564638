"""Plots of the convergence benchmark: loss against steps, or wall clock, and final loss against
learning rate."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from benchmarks.convergence.methods import KFAC_FOR_KFACADAMW, METHODS
from benchmarks.convergence.results import SWEEP_SEED, Run
from benchmarks.convergence.tasks import TASKS
from benchmarks.pictures import save
from ds_kfac.config.keys import parse

REFRESHED = "kfacadamw"
CURVE, RATES_BY_WIDTH = "batches.png", "widths.png"
FAMILIES = {
    "kfacadamw_unrotated": ("KFACAdamW without curvature", "#E69F00", "s"),
    "kfacadamw": ("KFACAdamW", "#0072B2", "o"),
    "kfac_adamw": ("K-FAC into AdamW", "#56B4E9", "P"),
    "kfac_sgd": ("K-FAC into SGD", "#F0E442", "X"),
    "kfac_nesterov": ("K-FAC into SGD with momentum", "#F0E442", "X"),
    "kfac_relative": ("the same, relative damping", "#56B4E9", "P"),
    "adamw": ("AdamW", "#000000", "^"),
    "muon": ("Muon", "#D55E00", "D"),
    "soap": ("SOAP", "#009E73", "v"),
    "shampoo": ("Shampoo", "#CC79A7", "<"),
    "sgd": ("SGD with momentum", "#999999", ">"),
}
"""First letters of a method -> its name, colour and marker in every picture. The colours are Okabe
and Ito's, which colour-blind readers can tell apart. The longest that fits counts; what is left of
the method's name follows it."""
FRONT = ("gpt_small", ("adamw", "muon", "kfacadamw_unrotated", "kfacadamw"))
"""Task and methods of README's picture."""
LINES = ("-", "--", ":", "-.")
"""Of methods of one family in one picture."""


def draw(
    best: dict[tuple[str, str], dict[int, Run]],
    out: Path,
    parts: Mapping[tuple[str, str], object] | None = None,
) -> list[Path]:
    """Loss against steps, a file for every task with races; returns them.

    Args:
        parts: (task, method) -> part of the steps of the task's base in which it is at the base's
            final loss.
    """
    files = []
    for task, ours in _raced(best).items():
        part, base = (parts or {}).get((task, REFRESHED)), name_of(base_of(task))
        title = f"{task}: each method at its best rate"
        if isinstance(part, float):
            title = f"{task}: KFACAdamW is at {base}'s final loss in {part:.0%} of its steps"
        files.append(
            _race(ours, "step", "step", f"{title} (thin: seeds)", out / f"{task}_loss.png")
        )
        if task == FRONT[0] and ours.keys() >= set(FRONT[1]) and isinstance(part, float):
            front = {method: ours[method] for method in FRONT[1]}
            title = (
                f"A byte GPT of 0.9 M: KFACAdamW is at AdamW's final loss in {part:.0%} of "
                f"its steps"
            )
            files.append(_race(front, "step", "step", title, out / "front.png"))
    return files


def base_of(task: str) -> str:
    """The method that a task's others are compared with."""
    return TASKS[task].base if task in TASKS else "adamw"


def loss_of(task: str, when: str = "held-out loss") -> str:
    """A label."""
    return f"{when} [{TASKS[task].unit if task in TASKS else 'nats per byte'}]"


def _race(ours: dict[str, list[Run]], column: str, label: str, title: str, path: Path) -> Path:
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for method, style in styles(ours).items():
        _curves(axis, ours[method], column, style)
    task = next(iter(ours.values()))[0].job.task
    axis.set(xlabel=label, ylabel=loss_of(task))
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    if ends := [run.final for found in ours.values() for run in found if math.isfinite(run.final)]:
        axis.set_ylim(min(ends) - 0.05, min(min(ends) + 2, axis.get_ylim()[1]))
    axis.legend(fontsize=8)
    return save(figure, path)


def styles(methods: Iterable[str]) -> dict[str, dict]:
    """Method -> how it is drawn, and its name as label."""
    found: dict[str, dict] = {}
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


def name_of(method: str) -> str:
    """As people say it."""
    family = _family(method)
    return FAMILIES[family][0] + method.removeprefix(family).replace("_", " ")


def draw_others(
    runs: list[Run], best: dict[tuple[str, str], dict[int, Run]], out: Path
) -> list[Path]:
    """Of every task the losses of its sweep, and KFACAdamW's training loss with its refreshes."""
    files = []
    out.mkdir(parents=True, exist_ok=True)
    raced = _raced(best)
    for task in sorted({run.job.task for run in runs}):
        if races := raced.get(task):
            seconds = "wall clock [s], training only"
            files.append(
                _race(
                    races,
                    "seconds",
                    seconds,
                    f"{task}: the same runs by time",
                    out / f"{task}_seconds.png",
                )
            )
        if ours := raced.get(task, {}).get(REFRESHED):
            files.append(_refreshes(ours, out / f"{task}_refreshes.png"))
        if sweep := [run for run in runs if run.job.task == task and not run.job.final]:
            files.append(_rates(sweep, out / f"{task}_rates.png"))
    return files


def _raced(best: dict[tuple[str, str], dict[int, Run]]) -> dict[str, dict[str, list[Run]]]:
    """Task -> method -> its races, one a seed."""
    tasks: dict[str, dict[str, list[Run]]] = {}
    for (task, method), found in best.items():
        if found:
            tasks.setdefault(task, {})[method] = list(found.values())
    return tasks


def in_order(methods: Iterable[str]) -> list[str]:
    """As in METHODS; those that are no longer there come last."""
    known = {method: place for place, method in enumerate(METHODS)}
    return sorted(methods, key=lambda method: (known.get(method, len(known)), method))


def _curves(axis, found: list[Run], column: str, style: dict) -> None:
    """The mean over the evaluations that all seeds have, and every seed."""
    curves = [run.held_out() for run in found]
    for curve in curves:
        points = [(row[column], row["held_out_loss"]) for row in curve]
        axis.plot(*zip(*points, strict=True), color=style["color"], lw=0.6, alpha=0.5)
    points = list(zip(*curves, strict=False))
    means = [
        [statistics.fmean(row[key] for row in point) for point in points]
        for key in (column, "held_out_loss")
    ]
    axis.plot(
        *means, lw=2, ms=4, **{**style, "label": f"{style['label']}, lr {found[0].job.rate:g}"}
    )


def refresh_steps(steps: int) -> list[int]:
    """Steps, counted from 1, at which KFACAdamW's eigenbases are refreshed."""
    schedule = parse(KFAC_FOR_KFACADAMW).schedule
    return [step + 1 for step in range(steps) if schedule.due(step).refresh]


def _refreshes(found: list[Run], path: Path) -> Path:
    """The training loss, with a line at every refresh: it does not jump there."""
    figure, axis = plt.subplots(figsize=(9, 4))
    for run in found:
        points = [(row["step"], row["loss"]) for row in run.rows]
        axis.plot(*zip(*points, strict=True), lw=0.8, label=f"seed {run.job.seed}")
    for step in refresh_steps(len(found[0].rows)):
        axis.axvline(step, color="black", lw=0.5, alpha=0.4)
    axis.set(
        xlabel="step",
        ylabel=loss_of(found[0].job.task, "training loss"),
        title=f"{found[0].job.task}: {REFRESHED}, vertical lines: eigenbases refreshed",
    )
    axis.legend()
    return save(figure, path)


def _rates(runs: list[Run], path: Path) -> Path:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    swept = sorted(
        (run for run in runs if run.job.seed == SWEEP_SEED), key=lambda run: run.job.rate
    )
    finite = [run.final for run in swept if math.isfinite(run.final)]
    top = min(max(finite), min(finite) + 1) + 0.1 if finite else 1.0
    for method, style in styles({run.job.method for run in swept}).items():
        ours = [run for run in swept if run.job.method == method]
        rates = [run.job.rate for run in ours]
        axis.plot(rates, [run.final for run in ours], **style)
        diverged = [run.job.rate for run in ours if math.isinf(run.final)]
        axis.plot(
            diverged, [top] * len(diverged), color=style["color"], marker="x", ls="", clip_on=False
        )
    axis.set(
        xscale="log",
        xlabel="peak learning rate",
        ylabel=loss_of(runs[0].job.task, "held-out loss at the end"),
    )
    axis.set(title=f"{runs[0].job.task}: sweep on seed {SWEEP_SEED}, x: diverged")
    axis.set_ylim(top=top)
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return save(figure, path)


def draw_batches(steps: dict[str, dict[int, list[float]]], out: Path) -> Path | None:
    """Steps to one loss against the bytes in a step: a method scales perfectly along a slope of
    -1."""
    if not steps:
        return None
    figure, axis = plt.subplots(figsize=(7, 4.5))
    drawn = styles(steps)
    for method, found in steps.items():
        means = [statistics.fmean(seeds) for seeds in found.values()]
        line = axis.plot(list(found), means, **drawn[method])[0]
        for size, seeds in found.items():
            axis.plot(
                [size] * len(seeds), seeds, color=line.get_color(), marker=".", ls="", alpha=0.5
            )
    axis.set(
        xscale="log", yscale="log", xlabel="bytes a step", ylabel="steps to the same held-out loss"
    )
    sizes = sorted({size for found in steps.values() for size in found})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.xaxis.set_minor_formatter(NullFormatter())
    for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        which(FormatStrFormatter("%g"))
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return save(figure, out / CURVE)


def draw_widths(losses: dict[str, dict[str, dict[float, float]]], out: Path) -> Path | None:
    """Loss against rate, an axis for every method and a curve for every width.

    Args:
        losses: method -> task -> rate -> loss at the end, infinite if it diverged.
    """
    if not losses:
        return None
    figure, axes = plt.subplots(
        1, len(losses), figsize=(5.5 * len(losses), 4.5), sharey=True, squeeze=False
    )
    finite = [
        loss
        for tasks in losses.values()
        for rates in tasks.values()
        for loss in rates.values()
        if loss < math.inf
    ]
    for axis, (method, tasks) in zip(axes[0], losses.items(), strict=True):
        for task, rates in tasks.items():
            points = [(rate, min(loss, max(finite) + 0.1)) for rate, loss in sorted(rates.items())]
            axis.plot(*zip(*points, strict=True), marker="o", label=task.replace("_", " "))
        axis.set(xscale="log", xlabel="peak learning rate", title=method)
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set(ylabel="held-out loss at the end [nats per byte]")
    axes[0][0].legend()
    return save(figure, out / RATES_BY_WIDTH)
