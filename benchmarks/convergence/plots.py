"""Plots of the convergence benchmark: loss against steps and wall clock, final loss against learning rate."""

import math
import statistics
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from benchmarks.convergence.methods import KFAC_FOR_KFACADAMW, METHODS
from benchmarks.convergence.results import SWEEP_SEED, Run
from benchmarks.pictures import save
from ds_kfac.config.keys import parse

REFRESHED = "kfacadamw"
CURVE, RATES_BY_WIDTH = "batches.png", "widths.png"
AXES = {"step": "step", "seconds": "wall clock [s], training only"}


def draw(runs: list[Run], best: dict[tuple[str, str], dict[int, Run]], out: Path) -> list[Path]:
    """A file for every task with races; returns them."""
    files, colors = [], _colors(runs)
    for task, ours in _raced(best).items():
        figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
        for axis, (column, label) in zip(axes, AXES.items(), strict=True):
            for method, found in ours.items():
                _curves(axis, found, column, colors[method], f"{method}, lr {found[0].job.rate:g}")
            axis.set(xlabel=label, title=f"{task}: at each method's best rate, thin: seeds")
            axis.grid(alpha=0.3)
        axes[0].set(ylabel="held-out loss [nats per byte]")
        if ends := [run.final for found in ours.values() for run in found if math.isfinite(run.final)]:
            axes[0].set_ylim(min(ends) - 0.05, min(min(ends) + 2, axes[0].get_ylim()[1]))
        axes[0].legend(fontsize=8)
        files.append(save(figure, out / f"{task}_loss.png"))
    return files


def draw_others(runs: list[Run], best: dict[tuple[str, str], dict[int, Run]], out: Path) -> list[Path]:
    """Of every task the losses of its sweep, and KFACAdamW's training loss with its refreshes."""
    files, colors = [], _colors(runs)
    out.mkdir(parents=True, exist_ok=True)
    raced = _raced(best)
    for task in sorted({run.job.task for run in runs}):
        if ours := raced.get(task, {}).get(REFRESHED):
            files.append(_refreshes(ours, out / f"{task}_refreshes.png"))
        if sweep := [run for run in runs if run.job.task == task and not run.job.final]:
            files.append(_rates(sweep, colors, out / f"{task}_rates.png"))
    return files


def _raced(best: dict[tuple[str, str], dict[int, Run]]) -> dict[str, dict[str, list[Run]]]:
    """Task -> method -> its races, one a seed."""
    tasks: dict[str, dict[str, list[Run]]] = {}
    for (task, method), found in best.items():
        if found:
            tasks.setdefault(task, {})[method] = list(found.values())
    return tasks


def _colors(runs: list[Run]) -> dict[str, tuple]:
    palette = cycle([*plt.cm.tab10.colors, *plt.cm.Dark2.colors])
    return dict(zip(in_order({run.job.method for run in runs}), palette, strict=False))


def in_order(methods: Iterable[str]) -> list[str]:
    """As in METHODS; those that are no longer there come last."""
    known = {method: place for place, method in enumerate(METHODS)}
    return sorted(methods, key=lambda method: (known.get(method, len(known)), method))


def _curves(axis, found: list[Run], column: str, color, label: str) -> None:
    """The mean over the evaluations that all seeds have, and every seed."""
    curves = [run.held_out() for run in found]
    for curve in curves:
        points = [(row[column], row["held_out_loss"]) for row in curve]
        axis.plot(*zip(*points, strict=True), color=color, lw=0.6, alpha=0.5)
    points = list(zip(*curves, strict=False))
    means = [[statistics.fmean(row[key] for row in point) for point in points] for key in (column, "held_out_loss")]
    axis.plot(*means, color=color, lw=2, marker="o", ms=3, label=label)


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
    axis.set(xlabel="step", ylabel="training loss [nats per byte]", title=f"{found[0].job.task}: {REFRESHED}, "
             "vertical lines: eigenbases refreshed")  # fmt: skip
    axis.legend()
    return save(figure, path)


def _rates(runs: list[Run], colors: dict[str, tuple], path: Path) -> Path:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    swept = sorted((run for run in runs if run.job.seed == SWEEP_SEED), key=lambda run: run.job.rate)
    finite = [run.final for run in swept if math.isfinite(run.final)]
    top = min(max(finite), min(finite) + 1) + 0.1 if finite else 1.0
    for method in in_order({run.job.method for run in swept}):
        ours = [run for run in swept if run.job.method == method]
        rates = [run.job.rate for run in ours]
        axis.plot(rates, [run.final for run in ours], color=colors[method], marker="o", label=method)
        diverged = [run.job.rate for run in ours if math.isinf(run.final)]
        axis.plot(diverged, [top] * len(diverged), color=colors[method], marker="x", ls="", clip_on=False)
    axis.set(xscale="log", xlabel="peak learning rate", ylabel="held-out loss at the end [nats per byte]")
    axis.set(title=f"{runs[0].job.task}: sweep on seed {SWEEP_SEED}, x: diverged")
    axis.set_ylim(top=top)
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return save(figure, path)


def draw_batches(steps: dict[str, dict[int, list[float]]], out: Path) -> Path | None:
    """Steps to one loss against the bytes in a step: a method scales perfectly along a slope of -1."""
    if not steps:
        return None
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for method, found in steps.items():
        means = [statistics.fmean(seeds) for seeds in found.values()]
        line = axis.plot(list(found), means, marker="o", label=method)[0]
        for size, seeds in found.items():
            axis.plot([size] * len(seeds), seeds, color=line.get_color(), marker=".", ls="", alpha=0.5)
    axis.set(xscale="log", yscale="log", xlabel="bytes a step", ylabel="steps to the same held-out loss")
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
    figure, axes = plt.subplots(1, len(losses), figsize=(5.5 * len(losses), 4.5), sharey=True, squeeze=False)
    finite = [
        loss for tasks in losses.values() for rates in tasks.values() for loss in rates.values() if loss < math.inf
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
