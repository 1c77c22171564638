"""Page and plots of the tasks that learn from rewards: steps to half and four fifths right,
entropy, KL to the base."""

import csv
import math
import statistics
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.report import best_runs, crossing, differences, swept
from benchmarks.convergence.results import Run, best_rate
from benchmarks.pictures import save

MARKS = {"half": 0.5, "four_fifths": 0.2}
"""Shares of wrong answers that are reached."""
GOOD = 0.8
"""Of the right answers at the best rate: what a rate that works ends with."""


def report(out: Path, runs: list[Run]) -> str:
    """Write summary.csv and plots into the folder and a markdown file next to it; returns the
    markdown."""
    best = best_runs(runs)
    rows = [
        _row(task, method, found, best.get((task, "adamw"), {}), runs)
        for (task, method), found in best.items()
    ]
    with open(out / "summary.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    lines = [
        "# Learning from rewards",
        "",
        "From benchmarks/convergence; what the columns mean is below. "
        "[Which pages are current](README.md).",
        "",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = {
            method: list(found.values())
            for (of, method), found in best.items()
            if of == task and found
        }
        lines += [f"## {task}", "", *_table([row for row in rows if row["task"] == task]), ""]
        if of_task:
            lines += [f"![{task}]({out.name}/{_draw(task, of_task, out).name})", ""]
    text = "\n".join([*lines, *differences(runs), *NOTES])
    (out.parent / f"{out.name}.md").write_text(text)
    return text


def collapsed(run: Run) -> bool:
    """Whether it ended with fewer right answers than it began with, or with less than half of the
    most it had."""
    right = [row["held_out_accuracy"] for row in run.held_out()]
    return run.diverged or not right or right[-1] < max(right[0], max(right) / 2)


def _row(
    task: str, method: str, found: dict[int, Run], base: dict[int, Run], runs: list[Run]
) -> dict[str, object]:
    rates = swept(runs, task, method)
    losses = {rate: run.final for rate, run in rates.items()}
    top = 1 - losses[best_rate(losses)] if best_rate(losses) is not None else math.inf
    working = [
        rate for rate, run in rates.items() if not collapsed(run) and 1 - run.final >= GOOD * top
    ]
    parts = [
        step / base[seed].rows[-1]["step"]
        for seed, run in found.items()
        if seed in base and (step := crossing(run, base[seed].final, "step")) is not None
    ]
    last = [run.held_out()[-1] for run in found.values()]
    row: dict[str, object] = {
        "task": task,
        "method": method,
        "rate": next(iter(found.values())).job.rate if found else "",
        "seeds": len(found),
        "right_mean": _of(statistics.fmean, [row["held_out_accuracy"] for row in last]),
        "right_min": _of(min, [row["held_out_accuracy"] for row in last]),
        "right_max": _of(max, [row["held_out_accuracy"] for row in last]),
    }
    for name, wrong in MARKS.items():
        for column in ("step", "samples"):
            reached = [crossing(run, wrong, column) for run in found.values()]
            reached = [value for value in reached if value is not None]
            row[f"{column}_to_{name}"], row[f"reached_{name}"] = (
                _of(statistics.fmean, reached),
                len(reached),
            )
    return row | {
        "compared": len(set(found) & set(base)),
        "reached_base": len(parts),
        "steps_fraction": _of(statistics.fmean, parts),
        "steps_fraction_min": _of(min, parts),
        "steps_fraction_max": _of(max, parts),
        "entropy": _of(statistics.fmean, [row["entropy"] for row in last]),
        "kl": _of(statistics.fmean, [row["kl"] for row in last]),
        "rates": " ".join(f"{rate:g}" for rate in rates),
        "working": " ".join(f"{rate:g}" for rate in working),
        "collapsed": " ".join(f"{rate:g}" for rate, run in rates.items() if collapsed(run)),
    }


def _of(function, values: list[float]) -> float | str:
    return function(values) if values else ""


def _table(rows: list[dict]) -> list[str]:
    header = [
        "method",
        "best rate",
        "right at the end",
        "steps (samples) to half",
        "to four fifths",
        "of AdamW's steps to its end",
        "entropy, KL at the end",
        "rates tried",
        "work",
        "collapse",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        cells = [row["method"], "", "", "", "", "", ""]
        if row["seeds"]:
            right = (
                f"{row['right_mean']:.3f} ({row['right_min']:.3f} to {row['right_max']:.3f}), "
                f"{row['seeds']} seeds"
            )
            marks = [_reached(row, name) for name in MARKS]
            part = "not reached" if row["compared"] else ""
            if row["reached_base"]:
                low, high = row["steps_fraction_min"], row["steps_fraction_max"]
                part = (
                    f"{row['steps_fraction']:.2f} ({low:.2f} to "
                    f"{high:.2f}){_count(row, 'reached_base', 'compared')}"
                )
            cells = [
                row["method"],
                f"{row['rate']:g}",
                right,
                *marks,
                part,
                f"{row['entropy']:.3f}, {row['kl']:.3f}",
            ]
        lines.append(
            "| " + " | ".join([*cells, row["rates"], row["working"], row["collapsed"]]) + " |"
        )
    return lines


def _reached(row: dict, name: str) -> str:
    if not row[f"reached_{name}"]:
        return "not reached"
    steps, samples = row[f"step_to_{name}"], row[f"samples_to_{name}"]
    return f"{steps:.0f} ({samples:,.0f}){_count(row, f'reached_{name}', 'seeds')}"


def _count(row: dict, reached: str, of: str) -> str:
    return "" if row[reached] == row[of] else f", {row[reached]} of {row[of]} seeds"


AXES = [
    ("step", "held_out_accuracy", "step", "share of right answers, held out, sampled"),
    ("kl", "held_out_accuracy", "KL to the base [nats per token]", "share of right answers"),
    ("step", "entropy", "step", "entropy [nats per token]"),
]


def _draw(task: str, ours: dict[str, list[Run]], out: Path) -> Path:
    colors = dict(zip(METHODS, cycle([*plt.cm.tab10.colors, *plt.cm.Dark2.colors]), strict=False))
    figure, axes = plt.subplots(1, len(AXES), figsize=(17, 4.5))
    for axis, (x, y, x_label, y_label) in zip(axes, AXES, strict=True):
        for method, runs in ours.items():
            for number, run in enumerate(runs):
                points = [(row[x], row[y]) for row in run.held_out()]
                label = None if number else f"{method}, lr {run.job.rate:g}"
                axis.plot(
                    *zip(*points, strict=True),
                    color=colors[method],
                    lw=1.2,
                    marker=".",
                    ms=3,
                    label=label,
                )
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.grid(alpha=0.3)
    axes[0].set(title=f"{task}: at each method's best rate, a line a seed")
    axes[0].legend(fontsize=8)
    return save(figure, out / f"{task}.png")


NOTES = [
    "Right: the share of 512 held-out questions to which a sampled answer is right, mean over "
    "seeds, smallest and",
    "largest in brackets, at the rate that was best with seed 0 on other questions. Seeds are of "
    "questions and",
    "samples; the base model is the same. To half, to four fifths: where that share is first "
    "reached, linear between",
    "evaluations. Of AdamW's steps: where the run reaches the share at which AdamW's of the same "
    "seed ends. A rate",
    "works if it ends with 0.8 of the right answers of the best rate; it collapses if it ends "
    "with fewer than it",
    "began with, or with less than half of the most it had. A loss below is the share of wrong "
    "answers.",
    "",
]
