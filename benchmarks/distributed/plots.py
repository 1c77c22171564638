"""Plots of the distributed benchmark: seconds of every step, and large models on up to 1024
ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.pictures import save

Row = Mapping[str, Any]
PAYLOAD_COLORS = ("0.75", "C0", "C1", "C2", "C4")
COLORS = dict(
    zip(
        ("no K-FAC", "all at once", "staggered", "staggered, lag"),
        ("gray", "C3", "C0", "C2"),
        strict=True,
    )
)
STYLES: Mapping[str, dict[str, Any]] = {
    "MEM-OPT": {"color": "C0", "marker": "o"},
    "HYBRID": {"color": "C1", "marker": "s"},
    "COMM-OPT": {"color": "C2", "marker": "D"},
    "ZeRO-3": {"color": "C3", "marker": "^", "ls": "--", "markerfacecolor": "white"},
}
"""What is drawn last may lie on the first, and lets it be seen."""


def draw_payload(bars: Sequence[tuple[str, Mapping[str, float], float | None]], path: Path) -> Path:
    """Stacked bars.

    Args:
        bars: (name, kind -> MB per step, target [MB] or None).
    """
    figure, axis = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    kinds = list(dict.fromkeys(kind for _, parts, _ in bars for kind in parts))
    for place, (_, parts, target) in enumerate(bars):
        bottom = 0.0
        for kind, value in parts.items():
            axis.bar(place, value, 0.62, bottom, color=PAYLOAD_COLORS[kinds.index(kind)])
            bottom += value
        axis.annotate(
            f"{bottom:.3g}",
            (place, max(bottom, target or 0.0)),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
        if target is not None:
            axis.hlines(target, place - 0.42, place + 0.42, color="black", lw=1.6)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PAYLOAD_COLORS[: len(kinds)]]
    line = plt.Line2D([], [], color="black", lw=1.6)
    axis.legend([*handles, line], [*kinds, "target"], fontsize=9, frameon=False)
    axis.set_xticks(range(len(bars)), [name for name, _, _ in bars], fontsize=9)
    axis.set_ylabel("payload of a rank [MB per step]")
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    return save(figure, path, tight=False)


def draw_times(rows: Sequence[Row], path: Path) -> Path:
    """A row of panels a strategy, a panel a mode."""
    strategies, modes = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("strategy", "mode")
    )
    figure, axes = plt.subplots(
        len(strategies),
        len(modes),
        figsize=(3.6 * len(modes), 2.3 * len(strategies)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row in rows:
        axis = axes[strategies.index(row["strategy"])][modes.index(row["mode"])]
        middle = sorted(row["wall"])[len(row["wall"]) // 2]
        axis.plot([1000 * seconds for seconds in row["wall"]], lw=0.9, color=COLORS[row["mode"]])
        axis.axhline(1500 * middle, color="black", lw=0.7, ls=":")
        axis.set_title(
            f"{row['strategy']}, {row['mode']}: {max(row['wall']) / middle:.2f}", fontsize=9
        )
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step of the interval")
    for axis, *_ in axes:
        axis.set_ylim(bottom=0)
        axis.set_ylabel("ms a step")
    figure.suptitle(
        "seconds of every step; number: worst / median, dotted: 1.5 medians", fontsize=10
    )
    return save(figure, path, tight=False)


def draw_losses(rows: Sequence[Row], path: Path) -> Path:
    """A panel for each optimizer and strategy, a line a run of the first seed, smoothed."""
    panels = list(dict.fromkeys((row["optimizer"], row["strategy"]) for row in rows))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.5 * len(panels), 3.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row in rows:
        if row["seed"] == rows[0]["seed"]:
            axis = axes[0][panels.index((row["optimizer"], row["strategy"]))]
            axis.plot(
                range(1, len(row["losses"]) + 1),
                _smooth(row["losses"]),
                lw=1.1,
                label=row["run"],
                alpha=0.85,
            )
    for axis, (optimizer, strategy) in zip(axes[0], panels, strict=True):
        axis.set_title(f"{optimizer}, {strategy}", fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("training loss [nats per byte]")
    return save(figure, path, tight=False)


def _smooth(losses: Sequence[float], decay: float = 0.9) -> list[float]:
    """Running average, bias-corrected."""
    found, average, weight = [], 0.0, 0.0
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        found.append(average / weight)
    return found


def draw_rows(groups: Sequence[tuple[str, str, Sequence[float]]], path: Path) -> Path:
    """Changes of the final loss, a dot a seed.

    Args:
        groups: (optimizer, rows of a factor, relative change of each seed).
    """
    figure, axis = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    names = list(dict.fromkeys(name for _, name, _ in groups))
    for index, optimizer in enumerate(dict.fromkeys(optimizer for optimizer, _, _ in groups)):
        own = {name: change for of, name, change in groups if of == optimizer}
        places = [names.index(name) for name in own]
        means = [100 * sum(change) / len(change) for change in own.values()]
        axis.plot(places, means, color=f"C{index}", marker="o", label=optimizer)
        for place, change in zip(places, own.values(), strict=True):
            axis.scatter(
                [place] * len(change),
                [100 * value for value in change],
                color=f"C{index}",
                s=12,
                alpha=0.6,
            )
    axis.axhline(0.0, color="gray", lw=0.8)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel("rows of a factor's batch")
    axis.set_ylabel("held-out loss against all rows [%]")
    axis.legend(fontsize=9, frameon=False)
    axis.grid(axis="y", alpha=0.25)
    return save(figure, path, tight=False)


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


def _grid(
    rows: Sequence[Row],
    models: list[str],
    quantities: dict[str, Callable[[Row], float]],
    path: Path,
) -> Path:
    """A column a model, a row a quantity, a line a strategy."""
    figure, axes = plt.subplots(
        len(quantities),
        len(models),
        figsize=(4 * len(models), 2.6 * len(quantities) + 0.8),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for line, (label, value) in zip(axes, quantities.items(), strict=True):
        for axis, model in zip(line, models, strict=True):
            for strategy, style in STYLES.items():
                points = [
                    (row["world"], value(row))
                    for row in rows
                    if (row["model"], row["strategy"]) == (model, strategy)
                ]
                axis.plot(*zip(*points, strict=True), ms=5, lw=1.3, label=strategy, **style)
            axis.set(xscale="log", yscale="log")
            axis.grid(alpha=0.25)
        line[0].set_ylabel(label)
    worlds = sorted({row["world"] for row in rows})
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(model)
    for axis in axes[-1]:
        axis.set_xticks(worlds, [str(world) for world in worlds], fontsize=9)
        axis.set_xticks([], minor=True)
        axis.set_xlabel("ranks")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(STYLES),
        frameon=False,
    )
    return save(figure, path, tight=False)
