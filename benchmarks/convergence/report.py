"""Tables of the convergence benchmark, from the runs on disk: best rates, steps and seconds to the
loss of AdamW, or of SGD for images, cost."""

import csv
import math
import statistics
from itertools import combinations, pairwise
from pathlib import Path

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.plots import (
    CURVE,
    RATES_BY_WIDTH,
    REFRESHED,
    base_of,
    draw,
    draw_batches,
    draw_others,
    draw_widths,
    in_order,
    refresh_steps,
)
from benchmarks.convergence.results import SWEEP_SEED, Run, best_rate, read_all
from benchmarks.convergence.tasks import BATCHES, TASKS

NAMES = {"adamw": "AdamW", "sgd": "SGD"}
"""Of the methods that others are compared with."""
TOLERANCE = 0.05
SETTLED = 20
"""Steps at the start in which the loss falls so fast that single ones do not compare."""


def report(out: Path) -> str:
    """Write summary.csv and pictures into the folder and a markdown file next to it; returns the
    markdown."""
    runs = read_all(out)
    rows = summarise(runs)
    if not rows:
        return f"no finished runs in {out}"
    with open(out / "summary.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    best = best_runs(runs)
    plots = draw(
        best, out, {(row["task"], row["method"]): row.get("steps_fraction") for row in rows}
    )
    if curve := draw_batches(steps_by_batch(best), out):
        plots.append(curve)
    if widths := draw_widths(losses_by_width(runs), out):
        plots.append(widths)
    text = markdown(
        rows, out.name, [plot.name for plot in plots], [*differences(runs), *jumps(runs)]
    )
    (out.parent / f"{out.name}.md").write_text(text)
    return text


def draw_more(runs: list[Run], out: Path) -> list[Path]:
    """The pictures that no page shows; returns them."""
    return draw_others(runs, best_runs(runs), out)


def best_runs(runs: list[Run]) -> dict[tuple[str, str], dict[int, Run]]:
    """(task, method) -> seed -> run of a race at the rate that was best in the sweep; none if every
    rate diverged, or none was in a race yet: the sweep's losses are of other data."""
    found = {}
    order = in_order({run.job.method for run in runs})
    pairs = {(run.job.task, run.job.method) for run in runs}
    for task, method in sorted(pairs, key=lambda pair: (pair[0], order.index(pair[1]))):
        losses = {rate: run.final for rate, run in swept(runs, task, method).items()}
        ours = [
            run
            for run in runs
            if (run.job.task, run.job.method, run.job.final) == (task, method, True)
        ]
        rate = best_rate(losses)
        found[task, method] = {
            run.job.seed: run for run in ours if rate is not None and run.job.rate == rate
        }
    return found


def swept(runs: list[Run], task: str, method: str) -> dict[float, Run]:
    """Rate -> run, rates ascending."""
    jobs = {
        (run.job.task, run.job.method, run.job.seed, run.job.rate): run
        for run in runs
        if not run.job.final
    }
    return {key[3]: jobs[key] for key in sorted(jobs) if key[:3] == (task, method, SWEEP_SEED)}


def crossing(run: Run, target: float, column: str) -> float | None:
    """Where the held-out curve first reaches a loss, linear between evaluations; None if it never
    does."""
    before = None
    for row in run.held_out():
        if row["held_out_loss"] <= target:
            if before is None:
                return row[column]
            part = (before["held_out_loss"] - target) / (
                before["held_out_loss"] - row["held_out_loss"]
            )
            return before[column] + part * (row[column] - before[column])
        before = row
    return None


def good_rates(losses: dict[float, float]) -> list[float]:
    """The rates around the best, without a gap, whose loss is within 5 % of its."""
    best, rates = best_rate(losses), sorted(losses)
    if best is None:
        return []
    low = high = rates.index(best)
    good = [losses[rate] <= (1 + TOLERANCE) * losses[best] for rate in rates]
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(rates) and good[high + 1]:
        high += 1
    return rates[low : high + 1]


def summarise(runs: list[Run]) -> list[dict[str, object]]:
    """A row for every task and method; an empty string is a number that there is not."""
    best = best_runs(runs)
    return [
        _row(task, method, found, best.get((task, base_of(task)), {}), runs)
        for (task, method), found in best.items()
    ]


def _row(
    task: str, method: str, found: dict[int, Run], base: dict[int, Run], runs: list[Run]
) -> dict[str, object]:
    finals = [run.final for run in found.values()]
    against = [
        (run, base[seed])
        for seed, run in found.items()
        if seed in base and math.isfinite(base[seed].final)
    ]
    steps, seconds, fractions = [], [], []
    for run, other in against:
        step = crossing(run, other.final, "step")
        if step is not None:
            steps.append(step)
            fractions.append(step / other.rows[-1]["step"])
            seconds.append(crossing(run, other.final, "seconds") / other.rows[-1]["seconds"])
    times = [second for run in found.values() for second in run.step_seconds]
    ratios = [
        statistics.fmean(run.step_seconds) / statistics.fmean(other.step_seconds)
        for run, other in against
    ]
    losses = {rate: run.final for rate, run in swept(runs, task, method).items()}
    good = good_rates(losses)
    return {
        "task": task,
        "method": method,
        "rate": next(iter(found.values())).job.rate if found else "",
        "seeds": len(found),
        "final_mean": _of(statistics.fmean, finals),
        "final_min": _of(min, finals),
        "final_max": _of(max, finals),
        "accuracy_mean": _of(
            statistics.fmean, [run.accuracy for run in found.values() if run.accuracy is not None]
        ),
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
        "good_rate_low": _of(min, good),
        "good_rate_high": _of(max, good),
        "good_rates_at_edge": int(
            bool(good) and (good[0] == min(losses) or good[-1] == max(losses))
        ),
        "rates": len(losses),
        "diverged_rates": " ".join(
            f"{rate:g}" for rate, loss in losses.items() if math.isinf(loss)
        ),
        "swept_rate": "" if (swept_rate := best_rate(losses)) is None else swept_rate,
        "swept_loss": "" if swept_rate is None else losses[swept_rate],
    }


def _of(function, values: list[float]) -> float | str:
    return function(values) if values else ""


def differences(runs: list[Run]) -> list[str]:
    """How far apart methods end, seed by seed (seeds differ by more than methods do), and how many
    of the steps of the one that ends higher the other takes to its loss."""
    lines, best = [], best_runs(runs)
    for (task, one), (other_task, other) in combinations(best, 2):
        pairs = [
            (run, best[task, other][seed])
            for seed, run in best[task, one].items()
            if task == other_task and seed in best[task, other]
        ]
        apart = [
            a.final - b.final for a, b in pairs if math.isfinite(a.final) and math.isfinite(b.final)
        ]
        if len(apart) > 1:
            error = statistics.stdev(apart) / len(apart) ** 0.5
            mean = statistics.fmean(apart)
            line = (
                f"- {task}, {one} minus {other}: {mean:+.3f}, s.e. {error:.3f}, {len(apart)} seeds"
            )
            lines.append(line + _sooner(one, other, pairs, mean))
    return ["Held-out losses at the end, paired by seed:", "", *lines, ""] if lines else []


def _sooner(one: str, other: str, pairs: list[tuple[Run, Run]], mean: float) -> str:
    if mean < 0:
        one, other, pairs = other, one, [(b, a) for a, b in pairs]
    steps = [crossing(low, high.final, "step") for high, low in pairs if math.isfinite(high.final)]
    parts = [
        step / len(high.rows)
        for step, (high, _) in zip(steps, pairs, strict=False)
        if step is not None
    ]
    if len(parts) < len(pairs):
        return (
            f"; {other} reaches {one}'s loss with {len(parts)} of {len(pairs)} seeds"
            if parts
            else ""
        )
    return (
        f"; {other} is at {one}'s in {statistics.fmean(parts):.2f} ({min(parts):.2f} to "
        f"{max(parts):.2f}) of its steps"
    )


def steps_by_batch(
    best: dict[tuple[str, str], dict[int, Run]],
) -> dict[str, dict[int, list[float]]]:
    """Method -> bytes a step -> steps to one loss, seed by seed: the loss that every method but
    AdamW, which ends much higher, reaches at every size with every seed. Empty with fewer than two
    sizes."""
    found = {key: ours for key, ours in best.items() if key[0] in BATCHES and ours}
    tasks = [task for task in BATCHES if any(of == task for of, _ in found)]
    methods = [m for m in METHODS if tasks and all((task, m) in found for task in tasks)]
    if len(tasks) < 2 or not methods:
        return {}
    others = [method for method in methods if method != "adamw"] or methods
    target = max(
        run.final for task in tasks for method in others for run in found[task, method].values()
    )
    reached = {
        method: {
            BATCHES[task]: [crossing(run, target, "step") for run in found[task, method].values()]
            for task in tasks
        }
        for method in methods
    }
    return {
        method: {
            size: [step for step in steps if step is not None]
            for size, steps in sizes.items()
            if None not in steps
        }
        for method, sizes in reached.items()
        if any(None not in steps for steps in sizes.values())
    }


def losses_by_width(runs: list[Run]) -> dict[str, dict[str, dict[float, float]]]:
    """Method -> task -> rate -> loss of the sweep, of methods that were swept at several widths."""
    tasks = [task for task in TASKS if task.startswith(("width_", "depth_"))]
    found = {
        method: {
            task: losses
            for task in tasks
            if (losses := {r: run.final for r, run in swept(runs, task, method).items()})
        }
        for method in METHODS
    }
    return {method: by_task for method, by_task in found.items() if len(by_task) > 1}


def jumps(runs: list[Run]) -> list[str]:
    """Whether the loss jumps where KFACAdamW refreshes eigenbases: its change after those steps and
    after others."""
    lines = []
    for (task, method), found in best_runs(runs).items():
        if method != REFRESHED or not found:
            continue
        at, elsewhere = [], []
        for run in found.values():
            refreshed = {step for step in refresh_steps(len(run.rows)) if step > SETTLED}
            for before, after in pairwise(run.rows):
                if before["step"] > SETTLED:
                    # the first loss that the new basis has had a hand in is the one after it
                    (at if before["step"] in refreshed else elsewhere).append(
                        after["loss"] - before["loss"]
                    )
        if at and elsewhere:
            lines.append(
                f"{task}, {method}: after a refresh the training loss changes by "
                f"{statistics.fmean(at):+.3f} on "
                f"average ({len(at)} refreshes after step {SETTLED}), after other steps by "
                f"{statistics.fmean(elsewhere):+.3f} (standard deviation "
                f"{statistics.stdev(elsewhere):.3f})."
            )
    return lines


def markdown(rows: list[dict], folder: str, plots: list[str], remarks: list[str]) -> str:
    """The tables, one a task, as a page. ``plots``: names of files in the folder."""
    lines = [
        "# Convergence",
        "",
        "From benchmarks/convergence; what the columns mean is below. "
        "[Which pages are current](README.md).",
        "",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        base = NAMES[base_of(task)]
        header = [
            "method",
            "best rate",
            "held-out loss at the end",
            f"steps to {base}'s",
            f"of {base}'s steps",
            f"of {base}'s seconds",
            "ms a step, median / mean",
            f"mean step to {base}'s",
            "rates within 5 %",
            "diverged",
        ]
        lines += [f"## {task}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows if row["task"] == task]
        lines += [
            "",
            *(f"![{plot}]({folder}/{plot})" for plot in plots if plot == f"{task}_loss.png"),
            "",
        ]
    lines += [f"![{text}]({folder}/{plot})" for plot, text in ACROSS.items() if plot in plots]
    return "\n".join([*lines, *remarks, *([""] if remarks else []), *NOTES])


ACROSS = {
    CURVE: "steps to one loss against the batch",
    RATES_BY_WIDTH: "loss against rate, a curve for every width",
}
"""Pictures of several tasks."""
NOTES = [
    "Loss: on the test part of the data, mean over seeds, smallest to largest in brackets, at the "
    "rate that was best",
    "on the validation part with seed 0; the two parts share no byte. Ranges of rates are of "
    "validation losses. All",
    "methods have the same linear warmup. To another's: where the test curve first reaches the "
    "loss at which its run",
    "of the same seed ends, linear between evaluations, mean over the seeds that reach it (their "
    "number, if not all).",
    "Seconds are of training only. A range of rates with * ends at an end of the sweep, so it may "
    "be wider. All runs",
    "are in the folder's csv files; `python -m benchmarks.convergence draw --out FOLDER` draws "
    "losses against rates,",
    "and KFACAdamW's training loss at refreshes.",
    "",
]


def _cells(row: dict) -> list[str]:
    if not row["seeds"]:
        if row["swept_rate"] == "":
            return [row["method"], "all diverged", *[""] * 7, row["diverged_rates"]]
        loss = f"not raced; {row['swept_loss']:.3f} in the sweep"
        return [
            row["method"],
            f"{row['swept_rate']:g}",
            loss,
            *[""] * 5,
            _good(row),
            row["diverged_rates"],
        ]

    def spread(name: str, digits: int) -> str:
        mean, low, high = (row[name + end] for end in ("", "_min", "_max"))
        return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    if not row["compared"]:
        reached = ["", "", ""]
    elif not row["reached"]:
        reached = ["not reached"] * 3
    else:
        part = (
            ""
            if row["reached"] == row["compared"]
            else f", {row['reached']} of {row['compared']} seeds"
        )
        reached = [
            f"{row['steps_to_base']:.0f}{part}",
            spread("steps_fraction", 2),
            spread("seconds_fraction", 2),
        ]
    loss = f"{row['final_mean']:.3f} ({row['final_min']:.3f} to {row['final_max']:.3f})"
    loss += f", {row['accuracy_mean']:.1%} right" if row["accuracy_mean"] != "" else ""
    times = f"{1000 * row['step_seconds_median']:.0f} / {1000 * row['step_seconds_mean']:.0f}"
    overhead = f"{row['overhead']:.2f}" if row["compared"] else ""
    return [
        row["method"],
        f"{row['rate']:g}",
        loss,
        *reached,
        times,
        overhead,
        _good(row),
        row["diverged_rates"],
    ]


def _good(row: dict) -> str:
    if not row["rates"]:  # not swept
        return ""
    return (
        f"{row['good_rate_low']:g} to "
        f"{row['good_rate_high']:g}{'*' if row['good_rates_at_edge'] else ''}"
    )
