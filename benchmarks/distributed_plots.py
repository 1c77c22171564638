"""Plots of the distributed benchmark: seconds of every step, and large models on up to 1024 ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Row = Mapping[str, Any]
COLORS = dict(zip(("no K-FAC", "all at once", "staggered", "staggered, lag"), ("gray", "C3", "C0", "C2"), strict=True))
MARKERS = dict(zip(("MEM-OPT", "HYBRID", "COMM-OPT", "ZeRO-3"), "osD^", strict=True))


def draw_times(rows: Sequence[Row], path: Path) -> Path:
    """A row of panels a strategy, a panel a mode."""
    strategies, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("strategy", "mode"))
    figure, axes = plt.subplots(
        len(strategies), len(modes), figsize=(3.6 * len(modes), 2.3 * len(strategies)), sharex=True, sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for row in rows:
        axis = axes[strategies.index(row["strategy"])][modes.index(row["mode"])]
        middle = sorted(row["wall"])[len(row["wall"]) // 2]
        axis.plot([1000 * seconds for seconds in row["wall"]], lw=0.9, color=COLORS[row["mode"]])
        axis.axhline(1500 * middle, color="black", lw=0.7, ls=":")
        axis.set_title(f"{row['strategy']}, {row['mode']}: {max(row['wall']) / middle:.2f}", fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step of the interval")
    for axis, *_ in axes:
        axis.set_ylim(bottom=0)
        axis.set_ylabel("ms a step")
    figure.suptitle("seconds of every step; number: worst / median, dotted: 1.5 medians", fontsize=10)
    return _save(figure, path)


def draw_losses(rows: Sequence[Row], path: Path) -> Path:
    """A panel for each optimizer and strategy, a line a run of the first seed, smoothed."""
    panels = list(dict.fromkeys((row["optimizer"], row["strategy"]) for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.2), sharey=True, squeeze=False,
                                layout="constrained")  # fmt: skip
    for row in rows:
        if row["seed"] == rows[0]["seed"]:
            axis = axes[0][panels.index((row["optimizer"], row["strategy"]))]
            axis.plot(range(1, len(row["losses"]) + 1), _smooth(row["losses"]), lw=1.1, label=row["run"], alpha=0.85)
    for axis, (optimizer, strategy) in zip(axes[0], panels, strict=True):
        axis.set_title(f"{optimizer}, {strategy}", fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("training loss [nats per byte]")
    return _save(figure, path)


def _smooth(losses: Sequence[float], decay: float = 0.9) -> list[float]:
    """Running average, bias-corrected."""
    found, average, weight = [], 0.0, 0.0
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        found.append(average / weight)
    return found


def draw_simulation(rows: Sequence[Row], out: Path) -> list[Path]:
    """Imbalance, bytes and state of all models; seconds on every link."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    quantities: dict[str, Callable[[Row], float]] = {
        "load of the busiest rank / mean": lambda row: row["imbalance"],
        "MB per step, busiest rank": lambda row: row["bytes"] / 1e6,
        "K-FAC state of a rank [GB]": lambda row: row["memory"] / 1e9,
    }
    seconds: dict[str, Callable[[Row], float]] = {
        f"K-FAC's seconds per step\n{link} Gbit/s": lambda row, link=link: row["seconds"][link]
        for link in rows[0]["seconds"]
    }
    return [
        _grid(rows, models, quantities, out / "simulation.png"),
        _grid(rows, models, seconds, out / "simulation_seconds.png"),
    ]


def _grid(rows: Sequence[Row], models: list[str], quantities: dict[str, Callable[[Row], float]], path: Path) -> Path:
    """A column a model, a row a quantity, a line a strategy."""
    figure, axes = plt.subplots(
        len(quantities), len(models), figsize=(4 * len(models), 2.8 * len(quantities)), sharex=True, sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, (label, value) in zip(axes, quantities.items(), strict=True):
        for axis, model in zip(line, models, strict=True):
            for strategy, marker in MARKERS.items():
                points = [
                    (row["world"], value(row)) for row in rows if (row["model"], row["strategy"]) == (model, strategy)
                ]
                axis.plot(*zip(*points, strict=True), marker=marker, ms=4, lw=1.2, label=strategy, alpha=0.85)
            axis.set(xscale="log", yscale="log")
            axis.grid(alpha=0.3, which="both")
        line[0].set_ylabel(label)
    worlds = sorted({row["world"] for row in rows})
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(model)
    for axis in axes[-1]:
        axis.set_xticks(worlds, [str(world) for world in worlds])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("ranks")
    axes[0][0].legend(fontsize=8)
    return _save(figure, path)


def _save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
