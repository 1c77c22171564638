"""Reward against steps, of all runs in a folder."""

import csv
from pathlib import Path
from typing import Any


def keep(trainer: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(
            [("step", "reward"), *((entry["step"], entry["reward"]) for entry in entries)]
        )


def draw(folder: Path) -> None:
    """All runs in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for path in sorted(folder.glob("*_rewards.csv")):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        axis.plot(
            [int(row["step"]) for row in rows],
            [float(row["reward"]) for row in rows],
            label=path.stem[:-8],
        )
    axis.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(folder / "rewards.png", dpi=130, bbox_inches="tight")
    plt.close(figure)
