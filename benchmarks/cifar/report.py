"""Tables and plots of the CIFAR-10 benchmark, from the runs on disk."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cifar.jobs import BASE, METHODS, Job, Runs, read, swept
from benchmarks.convergence.results import best_rate

Rows = list[dict[str, float]]
GOALS = 0.6, 0.8
"""Parts of SGD's epochs and of its seconds in which its final accuracy is to be reached."""


def sweep(
    runs: Runs, method: str, batch: int, parts: Sequence[float]
) -> tuple[dict[float, float], Job | None]:
    """:func:`swept` over the shortest schedule, or over the longest if nothing is there of that."""
    errors, job = swept(runs, method, batch, parts)
    return (errors, job) if errors else swept(runs, method, batch, [max(parts)])


def finished(
    runs: Runs, batch: int, parts: Sequence[float], seeds: Sequence[int]
) -> dict[str, dict[float, list[Rows]]]:
    """Method -> part -> runs at the rate that its sweep, or what there is of it, found best, one a
    seed."""
    found: dict[str, dict[float, list[Rows]]] = {}
    for method in METHODS:
        rate = best_rate(sweep(runs, method, batch, parts)[0])
        if rate is None:
            continue
        for part in sorted(parts, reverse=True):
            ours = [
                rows
                for seed in seeds
                if (rows := runs.rows(Job(method, rate, part, seed))) is not None
            ]
            if ours:
                found.setdefault(method, {})[part] = ours
    return found


def final(rows: Rows) -> float:
    """Test accuracy at the end; 0 if it diverged."""
    last = rows[-1]["test_accuracy"]
    return last if math.isfinite(last) else 0.0


def reached(rows: Rows, target: float) -> dict[str, float] | None:
    """The first evaluation with a test accuracy of at least ``target``."""
    return next((row for row in rows if row["test_accuracy"] >= target), None)


def shortest(by_part: Mapping[float, list[Rows]], target: float) -> float | None:
    """The least part of all epochs after whose schedule the mean accuracy is at least
    ``target``."""
    enough = [
        part for part, ours in by_part.items() if statistics.fmean(map(final, ours)) >= target
    ]
    return min(enough, default=None)


def page(
    runs: Runs, about: Mapping[str, Any], batch: int, parts: Sequence[float], seeds: Sequence[int]
) -> str:
    """Markdown of one folder of runs."""
    found = finished(runs, batch, parts, seeds)
    if not found:
        return f"no finished runs in {runs.folder}"
    whole = found.get(BASE, {}).get(max(parts), [])
    target = statistics.fmean(map(final, whole)) if whole else None
    epochs, taken = (
        statistics.fmean(rows[-1][key] for rows in whole) if whole else 0.0
        for key in ("epoch", "seconds")
    )
    ordered = sorted(parts, reverse=True)
    head = [
        "method",
        "rate",
        *(f"{about['epochs'] * part:g} epochs" for part in ordered),
        "seconds an epoch",
        "memory, MB",
        "epochs to SGD's accuracy within them",
        "shortest schedule that ends at it",
        "of SGD's seconds",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method, by_part in found.items():
        errors, job = sweep(runs, method, batch, parts)
        edge = job is None and best_rate(errors) in (min(errors), max(errors))
        rate = f"{best_rate(errors):g}" + (
            "*" if edge else "" if job is None else " (sweep not done)"
        )
        accuracies = [_accuracies(by_part.get(part, [])) for part in ordered]
        all_rows = [rows for ours in by_part.values() for rows in ours]
        cost = statistics.fmean(rows[-1]["seconds"] / rows[-1]["epoch"] for rows in all_rows)
        memory = max(rows[-1]["memory_mb"] for rows in all_rows)
        cells = [method, rate, *accuracies, f"{cost:.3g}", f"{memory:.0f}", *["-"] * 3]
        if target is not None and method != BASE:
            places = [
                place
                for rows in by_part.get(max(parts), [])
                if (place := reached(rows, target)) is not None
            ]
            part = shortest(by_part, target)
            if places:
                mean = statistics.fmean(place["epoch"] for place in places)
                cells[-3] = (
                    f"{mean:.3g} ({mean / epochs:.2f}), {len(places)} of "
                    f"{len(by_part[max(parts)])} seeds"
                )
            cells[-2:] = ["not reached"] * 2
            if part is not None:
                seconds = statistics.fmean(rows[-1]["seconds"] for rows in by_part[part])
                cells[-2:] = [f"{part:g} of its epochs", f"{seconds / taken:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    plots = [f"![{plot.stem}]({runs.folder.name}/{plot.name})" for plot in draw(found, runs.folder)]
    return "\n".join(
        [f"## {runs.folder.name}", "", f"{facts}.", "", *lines, "", *plots, "", *NOTES]
    )


def _accuracies(ours: list[Rows]) -> str:
    values = [100 * final(rows) for rows in ours]
    if not values:
        return ""
    spread = (
        f" ({min(values):.1f} to {max(values):.1f}, {len(values)} seeds)"
        if len(values) > 1
        else " (1 seed)"
    )
    return f"{statistics.fmean(values):.1f} %{spread}"


NOTES = [
    "Accuracy on the test part of the held-out images (four of five; the fifth chooses the rate, "
    "with seed 0 and the",
    "shortest schedule) at the end, mean over seeds. Linear warmup over 5 %, then a cosine, for "
    "all alike. Seconds are",
    "of training only; what compiles and allocates once is not in them. A rate with * is at an "
    "end of its sweep.",
    "kfac_sc20 and kfac_kaisa: see benchmarks/cifar/jobs.py. Goals: SGD's accuracy in "
    f"{GOALS[0]:g} of its epochs and {GOALS[1]:g} of",
    "its seconds.",
    "",
]


def draw(found: Mapping[str, Mapping[float, list[Rows]]], folder: Path) -> list[Path]:
    """Test accuracy over epochs and over seconds: the longest schedule solid, shorter ones dashed;
    first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from benchmarks.pictures import save

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for color, (method, by_part) in zip(plt.get_cmap("tab10").colors, found.items(), strict=False):
        for part, ours in by_part.items():
            for axis, column in zip(axes, ("epoch", "seconds"), strict=True):
                label = method if part == max(by_part) and axis is axes[0] else None
                values = [(row[column], 100 * row["test_accuracy"]) for row in ours[0]]
                axis.plot(
                    *zip(*values, strict=True),
                    color=color,
                    ls="-" if part == max(by_part) else "--",
                    label=label,
                )
    axes[0].set(xlabel="epoch", ylabel="test accuracy [%]")
    axes[1].set(xlabel="seconds of training")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    return [save(figure, folder / "accuracy.png", tight=False)]


def progress(
    runs: Runs, jobs: Sequence[Job], steps: Mapping[Job, int], assumed: Mapping[str, float]
) -> list[str]:
    """A line for every run that is missing: its steps, and seconds by what steps of its method took
    so far."""
    lines, total = [], 0.0
    for job in jobs:
        measured = [rows[-1]["seconds"] / rows[-1]["step"] for rows in _of(runs, job.method)]
        each = statistics.fmean(measured) if measured else assumed[job.method]
        total += each * steps[job]
        how = "measured" if measured else "assumed"
        lines.append(
            f"{job.name}: {steps[job]} steps, {each * steps[job]:.0f} s ({1e3 * each:.3g} ms a "
            f"step, {how})"
        )
    return [*lines, f"{len(jobs)} runs, {total:.0f} s, without evaluations"]


def _of(runs: Runs, method: str) -> list[Rows]:
    tables = (
        read(path)
        for end in ("csv", "partial")
        for path in (runs.folder / "runs").glob(f"{method}_lr*.{end}")
    )
    return [rows for rows in tables if rows]
