"""The page of a results folder: rates, steps and seconds to the base method's loss, cost of a step.

The base method is AdamW, or SGD for images.
"""

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.plots import CURVE, base_of, draw, draw_batches, in_order, judged_by
from benchmarks.convergence.runs import SWEEP_SEED, Row, Run, best_rate, read_all
from benchmarks.convergence.tasks import BATCHES

NAMES = {"adamw": "AdamW", "sgd": "SGD"}
TOLERANCE = 0.05
"""A rate is good if its error is within this part of the best rate's."""
Best = Mapping[tuple[str, str], dict[int, Run]]
"""(task, method) -> seed -> run at the rate that was best in the sweep."""


def report(out: Path) -> str:
    """Write summary.csv and plots into the folder and a page next to it; return the page."""
    runs = read_all(out)
    rows = summarise(runs)
    if not rows:
        return f"no finished runs in {out}"
    with open(out / "summary.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    best = best_runs(runs)
    parts = {(row["task"], row["method"]): row["steps_fraction"] for row in rows}
    plots = draw(best, out, parts)
    if curve := draw_batches(steps_by_batch(best), out):
        plots.append(curve)
    text = markdown(rows, out.name, [plot.name for plot in plots], differences(best))
    (out.parent / f"{out.name}.md").write_text(text)
    return text


def best_runs(runs: Sequence[Run]) -> Best:
    """Return the final runs at each method's best rate; none if every rate diverged.

    Without a sweep it is the rate whose final runs end lowest.
    """
    order = in_order({run.job.method for run in runs})
    pairs = {(run.job.task, run.job.method) for run in runs}
    found = {}
    for task, method in sorted(pairs, key=lambda pair: (pair[0], order.index(pair[1]))):
        column = judged_by(task)
        ours = [run for run in runs if (run.job.task, run.job.method) == (task, method)]
        finals = [run for run in ours if run.job.final]
        errors = {rate: run.error(column) for rate, run in swept(runs, task, method).items()}
        rate = best_rate(errors or {run.job.rate: run.error(column) for run in finals})
        chosen = [run for run in finals if rate is not None and run.job.rate == rate]
        found[task, method] = {run.job.seed: run for run in chosen}
    return found


def swept(runs: Sequence[Run], task: str, method: str) -> dict[float, Run]:
    """Return the runs of a sweep by rate, rates ascending."""
    key = task, method, SWEEP_SEED
    ours = [run for run in runs if (run.job.task, run.job.method, run.job.seed) == key]
    found = {run.job.rate: run for run in ours if not run.job.final}
    return {rate: found[rate] for rate in sorted(found)}


def crossing(run: Run, target: float, column: str) -> float | None:
    """Return where the held-out curve first reaches an error, linear between evaluations."""
    before = None
    for row in run.curve(judged_by(run.job.task)):
        if row["error"] <= target:
            if before is None:
                return row[column]
            part = (before["error"] - target) / (before["error"] - row["error"])
            return before[column] + part * (row[column] - before[column])
        before = row
    return None


def good_rates(errors: dict[float, float]) -> list[float]:
    """Return the rates around the best one, without a gap, whose error is within 5 % of its."""
    best, rates = best_rate(errors), sorted(errors)
    if best is None:
        return []
    low = high = rates.index(best)
    good = [errors[rate] <= (1 + TOLERANCE) * errors[best] for rate in rates]
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(rates) and good[high + 1]:
        high += 1
    return rates[low : high + 1]


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Return a row for every task and method; an empty string is a number that there is not."""
    best = best_runs(runs)
    return [
        _row(task, method, found, best.get((task, base_of(task)), {}), runs)
        for (task, method), found in best.items()
    ]


def _row(
    task: str, method: str, found: dict[int, Run], base: dict[int, Run], runs: Sequence[Run]
) -> Row:
    column = judged_by(task)
    finals = [run.final for run in found.values()]
    against = [
        (run, base[seed])
        for seed, run in found.items()
        if seed in base and math.isfinite(base[seed].error(column))
    ]
    steps, seconds, fractions = [], [], []
    for run, other in against:
        target, last = other.error(column), other.rows[-1]
        step = crossing(run, target, "step")
        if step is not None:
            steps.append(step)
            fractions.append(step / last["step"])
            seconds.append(crossing(run, target, "seconds") / last["seconds"])
    ratios = [
        statistics.fmean(run.step_seconds) / statistics.fmean(other.step_seconds)
        for run, other in against
    ]
    times = [second for run in found.values() for second in run.step_seconds]
    accuracies = [run.accuracy for run in found.values() if run.accuracy is not None]
    memory = [row.get("memory_mb", math.nan) for run in found.values() for row in run.rows]
    errors = {rate: run.error(column) for rate, run in swept(runs, task, method).items()}
    good, best = good_rates(errors), best_rate(errors)
    return {
        "task": task,
        "method": method,
        "rate": next(iter(found.values())).job.rate if found else "",
        "seeds": len(found),
        "final_mean": _of(statistics.fmean, finals),
        "final_min": _of(min, finals),
        "final_max": _of(max, finals),
        "accuracy_mean": _of(statistics.fmean, accuracies),
        "compared": len(against),
        "reached": len(steps),
        "steps_to_base": _of(statistics.fmean, steps),
        "steps_fraction": _of(statistics.fmean, fractions),
        "steps_fraction_min": _of(min, fractions),
        "steps_fraction_max": _of(max, fractions),
        "seconds_fraction": _of(statistics.fmean, seconds),
        "seconds_fraction_min": _of(min, seconds),
        "seconds_fraction_max": _of(max, seconds),
        "step_seconds_median": _of(statistics.median, times),
        "step_seconds_mean": _of(statistics.fmean, times),
        "overhead": _of(statistics.fmean, ratios),
        "memory_mb": _of(max, [value for value in memory if math.isfinite(value)]),
        "good_rate_low": _of(min, good),
        "good_rate_high": _of(max, good),
        "good_rates_at_edge": int(
            bool(good) and (good[0] == min(errors) or good[-1] == max(errors))
        ),
        "rates": len(errors),
        "diverged_rates": " ".join(f"{rate:g}" for rate, x in errors.items() if math.isinf(x)),
        "swept_rate": "" if best is None else best,
        "swept_error": "" if best is None else errors[best],
    }


def _of(function: Callable[[list[float]], float], values: list[float]) -> float | str:
    return function(values) if values else ""


def differences(best: Best) -> list[str]:
    """Say how far apart methods end, paired by seed, as seeds differ by more than methods do."""
    lines = []
    for (task, one), (other_task, other) in combinations(best, 2):
        shared = best[task, one].keys() & best[other_task, other].keys()
        if task != other_task or len(shared) < 2:
            continue
        pairs = [(best[task, one][seed], best[task, other][seed]) for seed in sorted(shared)]
        apart = [a.final - b.final for a, b in pairs if math.isfinite(a.final - b.final)]
        if len(apart) > 1:
            error = statistics.stdev(apart) / len(apart) ** 0.5
            mean = statistics.fmean(apart)
            line = f"- {task}, {one} minus {other}: {mean:+.3f}, s.e. {error:.3f}"
            lines.append(f"{line}, {len(apart)} seeds{_sooner(one, other, pairs, mean)}")
    return ["Held-out losses at the end, paired by seed:", "", *lines, ""] if lines else []


def _sooner(one: str, other: str, pairs: list[tuple[Run, Run]], mean: float) -> str:
    """Say in which part of the worse method's steps the better one reaches its final loss."""
    if mean < 0:
        one, other, pairs = other, one, [(b, a) for a, b in pairs]
    parts = []
    for worse, better in pairs:
        target = worse.error(judged_by(worse.job.task))
        step = crossing(better, target, "step") if math.isfinite(target) else None
        if step is not None:
            parts.append(step / len(worse.rows))
    if len(parts) < len(pairs):
        reached = f"{len(parts)} of {len(pairs)} seeds"
        return f"; {other} reaches {one}'s final loss with {reached}" if parts else ""
    spread = f"{statistics.fmean(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"
    return f"; {other} reaches {one}'s final loss in {spread} of {one}'s steps"


def steps_by_batch(best: Best) -> dict[str, dict[int, list[float]]]:
    """Return method -> bytes in a step -> steps to one loss, for each seed.

    The loss is the one that every method but AdamW, which ends much higher, reaches at every size
    with every seed. Empty with fewer than two sizes.
    """
    tasks = [task for task in BATCHES if any(of == task and ours for (of, _), ours in best.items())]
    methods = [m for m in METHODS if all(best.get((task, m)) for task in tasks)]
    if len(tasks) < 2 or not methods:
        return {}
    others = [method for method in methods if method != "adamw"] or methods
    target = max(run.final for t in tasks for m in others for run in best[t, m].values())
    found: dict[str, dict[int, list[float]]] = {}
    for method in methods:
        for task in tasks:
            runs = best[task, method].values()
            steps = [s for run in runs if (s := crossing(run, target, "step")) is not None]
            if len(steps) == len(runs):
                found.setdefault(method, {})[BATCHES[task]] = steps
    return found


def markdown(rows: list[Row], folder: str, plots: list[str], remarks: list[str]) -> str:
    lines = [
        "# Convergence",
        "",
        "benchmarks/convergence made this page; the last paragraph explains the columns. "
        "[Which pages are current](README.md).",
        "",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        base = NAMES.get(base_of(task), base_of(task))
        header = [
            *("method", "best rate", "held-out loss at the end", f"steps to {base}'s"),
            *(f"of {base}'s steps", f"of {base}'s seconds", "ms a step, median / mean"),
            *(f"mean step to {base}'s", "rates within 5 %", "diverged"),
        ]
        lines += [f"## {task}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in rows if row["task"] == task]
        own = [plot for plot in plots if plot == f"{task}_loss.png"]
        lines += ["", *(f"![{plot}]({folder}/{plot})" for plot in own), ""]
    if CURVE in plots:
        lines.append(f"![steps to one loss against the batch]({folder}/{CURVE})")
    return "\n".join([*lines, *remarks, *([""] if remarks else []), NOTES])


NOTES = """Losses are means over seeds on the test part of the data, with the smallest and the
largest in brackets. The learning rate ("rate") was the best on the validation part with seed 0; the
two parts share no data. All methods have the same linear warmup. Columns of steps and seconds to
another method's loss say when the test curve first reaches the final loss of that method's run with
the same seed (for CIFAR-10: the accuracy), interpolated linearly between evaluations. They are
means over the seeds that reach it, with the number of these seeds if not all do. Seconds are of
training only. The column "mean step to" is a ratio of seconds per step. "Rates within 5 %" have
validation losses within 5 % of the best; a range with * ends at an end of the sweep, so it may be
wider. All runs are in the folder's csv files.
"""


def _cells(row: Row) -> list[str]:
    if not row["seeds"]:
        if row["swept_rate"] == "":
            return [row["method"], "all diverged", *[""] * 7, row["diverged_rates"]]
        end = f"not run to the end; {row['swept_error']:.3f} in the sweep"
        rate = f"{row['swept_rate']:g}"
        return [row["method"], rate, end, *[""] * 5, _good(row), row["diverged_rates"]]
    reached = ["", "", ""]
    if row["compared"] and not row["reached"]:
        reached = ["not reached"] * 3
    elif row["compared"]:
        all_seeds = row["reached"] == row["compared"]
        part = "" if all_seeds else f", {row['reached']} of {row['compared']} seeds"
        reached = [f"{row['steps_to_base']:.0f}{part}"]
        reached += [_spread(row, "steps_fraction", 2), _spread(row, "seconds_fraction", 2)]
    loss = f"{row['final_mean']:.3f} ({row['final_min']:.3f} to {row['final_max']:.3f})"
    loss += f", {row['accuracy_mean']:.1%} right" if row["accuracy_mean"] != "" else ""
    times = f"{1000 * row['step_seconds_median']:.0f} / {1000 * row['step_seconds_mean']:.0f}"
    overhead = f"{row['overhead']:.2f}" if row["compared"] else ""
    rate = f"{row['rate']:g}"
    end = [times, overhead, _good(row), row["diverged_rates"]]
    return [row["method"], rate, loss, *reached, *end]


def _spread(row: Row, name: str, digits: int) -> str:
    mean, low, high = (row[name + end] for end in ("", "_min", "_max"))
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _good(row: Mapping[str, Any]) -> str:
    if not row["rates"]:
        return ""
    edge = "*" if row["good_rates_at_edge"] else ""
    return f"{row['good_rate_low']:g} to {row['good_rate_high']:g}{edge}"
