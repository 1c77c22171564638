"""Plots of runs/<name>/metrics.csv: python examples/plots.py RUN [RUN ...] --out FOLDER"""

import argparse
import csv
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STAGES = [
    "forward",
    "backward",
    "optimizer",
    "capture",
    "reduce",
    "refresh",
    "relayout",
    "precondition",
]
"""Columns seconds_<stage>: DeepSpeed's own, without K-FAC; then the stages of K-FAC."""
SMOOTHING = 10


def read(run: Path) -> dict[str, list[float]]:
    """Columns of a run's metrics.csv; empty cells are left out as nan."""
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{run / 'metrics.csv'} has no rows")
    return {key: [float(row[key]) if row[key] else float("nan") for row in rows] for key in rows[0]}


def smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(values))]


def draw(runs: list[Path], out: Path) -> list[Path]:
    """Loss against steps and against wall clock, and where a step's time goes; returns the files
    written."""
    out.mkdir(parents=True, exist_ok=True)
    tables = {run.name: read(run) for run in runs}
    files = []
    for column, label, scale in (
        ("step", "step", 1),
        ("seconds", "wall clock [s], without evaluation", 1),
    ):
        figure, axis = plt.subplots(figsize=(7, 4.5))
        for color, (name, table) in zip(plt.cm.tab10.colors, tables.items(), strict=False):
            axis.plot(table[column], smooth(table["loss"]), color=color, alpha=0.35, linewidth=1)
            evaluated = [
                (x * scale, y)
                for x, y in zip(table[column], table["held_out_loss"], strict=True)
                if y == y
            ]
            axis.plot(
                *zip(*evaluated, strict=True),
                color=color,
                marker="o",
                markersize=3,
                label=f"{name}, held out",
            )
        axis.set(
            xlabel=label, ylabel="loss [nats]", title=f"thin: training, mean of {SMOOTHING} steps"
        )
        axis.set_ylim(top=min(4.0, axis.get_ylim()[1]))
        axis.grid(alpha=0.3)
        axis.legend()
        files.append(_save(figure, out / f"loss_by_{column}.png"))
    classified = {name: table for name, table in tables.items() if "held_out_accuracy" in table}
    if classified:
        files.append(_accuracy(classified, out))
    figure, axis = plt.subplots(figsize=(7, 1.6 + 0.6 * len(tables)))
    for row, (_, table) in enumerate(tables.items()):
        left = 0.0
        for stage, color in zip(STAGES, plt.cm.tab10.colors, strict=False):
            mean = 1000 * statistics.fmean(table.get(f"seconds_{stage}", [0.0]))
            axis.barh(row, mean, left=left, color=color, label=stage if row == 0 else None)
            left += mean
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color)
        for _, color in zip(STAGES, plt.cm.tab10.colors, strict=False)
    ]
    axis.legend(
        handles, STAGES, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35), fontsize=8
    )
    axis.set_yticks(range(len(tables)), list(tables))
    axis.set(xlabel="mean time of a step on rank 0 [ms]")
    files.append(_save(figure, out / "step_time.png"))
    return files


def _accuracy(tables: dict[str, dict[str, list[float]]], out: Path) -> Path:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, table in tables.items():
        known = [
            (x, 100 * y)
            for x, y in zip(table["step"], table["held_out_accuracy"], strict=True)
            if y == y
        ]
        axis.plot(*zip(*known, strict=True), marker="o", markersize=3, label=name)
    axis.set(xlabel="step", ylabel="held-out accuracy [%]")
    axis.grid(alpha=0.3)
    axis.legend()
    return _save(figure, out / "accuracy_by_step.png")


def _save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for file in draw(arguments.runs, arguments.out):
        print(file)
    print(f"{'run':24} {'steps':>6} {'held-out loss':>14} {'seconds':>8} {'median step [ms]':>17}")
    for run in arguments.runs:
        table = read(run)
        losses = [y for y in table["held_out_loss"] if y == y]
        step = 1000 * statistics.median(table["step_seconds"])
        print(
            f"{run.name:24} {len(table['step']):6d} {losses[-1]:14.4f} {table['seconds'][-1]:8.1f} "
            f"{step:17.1f}"
        )


if __name__ == "__main__":
    main()
