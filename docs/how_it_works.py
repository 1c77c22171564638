"""Draws docs/explanation/how_it_works.png: one step of K-FAC. ``python docs/how_it_works.py``"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# in every step; only where it is due; DeepSpeed's or the model's
EVERY, DUE, THEIRS = "#d6e6f7", "#fde3c4", "#e6e6e6"
EDGES = {EVERY: "#1f5a96", DUE: "#b5651d", THEIRS: "#666666"}
ROWS = {"a factor's\nowner": 4.9, "every rank": 2.9, "a layer's\ngradient worker": 0.95}
HEIGHT = 1.25


def box(axes: Axes, x: float, row: str, width: float, text: str, colour: str) -> None:
    """Centred at ``x`` in its row."""
    shape = FancyBboxPatch(
        (x - width / 2, ROWS[row] - HEIGHT / 2),
        width,
        HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=colour,
        edgecolor=EDGES[colour],
        linewidth=1.3,
    )
    axes.add_patch(shape)
    axes.text(x, ROWS[row], text, ha="center", va="center", fontsize=9, linespacing=1.45)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    bend: str = "arc3",
) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.5, "color": EDGES[colour]}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=bend, shrinkA=0, shrinkB=0, **style))


def note(axes: Axes, x: float, y: float, text: str, colour: str, side: str) -> None:
    """Beside an arrow."""
    axes.text(
        x, y, text, ha=side, va="center", fontsize=9.5, color=EDGES[colour], backgroundcolor="white"
    )


def draw() -> pyplot.Figure:
    """The picture."""
    figure, axes = pyplot.subplots(figsize=(12.6, 5.4))
    axes.set(xlim=(0, 16.5), ylim=(0.1, 6.5))
    axes.axis("off")
    owner, ranks, worker = ROWS
    top, middle, bottom = ROWS.values()
    half = HEIGHT / 2
    for row, y in ROWS.items():
        axes.text(0.05, y, row, ha="left", va="center", fontsize=10, weight="bold")
    for y in ((top + middle) / 2, (middle + bottom) / 2):
        axes.axhline(y, xmax=0.98, color="#cccccc", linewidth=0.8, linestyle=":")
    for x, text in (
        (3.55, "forward and backward"),
        (9.9, "step: after DeepSpeed averaged the gradients"),
    ):
        axes.text(x, 6.2, text, ha="center", va="center", fontsize=10, style="italic")
    axes.axvline(5.45, ymin=0.02, ymax=0.97, color="#999999", linewidth=0.9)

    box(axes, 2.6, ranks, 1.5, "forward:\nsave input $a$", DUE)
    box(axes, 4.45, ranks, 1.6, "backward:\n" r"sums of $a\,a^\top$" "\n" r"and $g\,g^\top$", DUE)
    box(axes, 6.9, ranks, 1.8, "averaged\n" r"gradient $dW$", THEIRS)
    box(axes, 13.3, ranks, 1.95, "result in the\nplace of the\ngradient", EVERY)
    box(axes, 15.5, ranks, 1.6, "inner\noptimizer\nsteps", THEIRS)
    box(
        axes,
        8.3,
        owner,
        2.8,
        "update, every 10 steps\n" r"$A \leftarrow r A + (1-r)\,A_{batch}$",
        DUE,
    )
    box(
        axes,
        11.7,
        owner,
        2.8,
        "refresh, every 50 steps\n" r"$A = Q_A\,\mathrm{diag}(\alpha)\,Q_A^\top$",
        DUE,
    )
    box(
        axes,
        10.1,
        worker,
        3.9,
        "precondition, every step\n"
        r"$R = Q_G^\top dW\,Q_A,\quad V = Q_G\,R'\,Q_A^\top$",
        EVERY,
    )

    arrow(axes, (3.35, middle), (3.65, middle), DUE)
    arrow(axes, (4.45, middle + half), (6.9, top), DUE, "angle,angleA=90,angleB=180,rad=8")
    note(axes, 5.63, 5.2, "1  reduce", DUE, "left")
    arrow(axes, (9.7, top), (10.3, top), DUE)
    arrow(axes, (11.2, top - half), (11.2, bottom + half), DUE)
    note(axes, 11.08, middle, "2  deliver\n" r"$Q_A,\ \alpha$", DUE, "right")
    arrow(axes, (6.9, middle - half), (8.15, bottom), EVERY, "angle,angleA=-90,angleB=180,rad=8")
    note(axes, 7.1, 1.93, "3  gather", EVERY, "left")
    arrow(axes, (12.05, bottom), (13.3, middle - half), EVERY, "angle,angleA=0,angleB=90,rad=8")
    note(axes, 13.5, 1.93, "4  scatter", EVERY, "left")
    arrow(axes, (14.275, middle), (14.7, middle), EVERY)

    for place, (colour, text) in enumerate(
        ((EVERY, "in every step"), (DUE, "only when due"), (THEIRS, "DeepSpeed"))
    ):
        y = 5.55 - 0.45 * place
        axes.add_patch(
            FancyBboxPatch(
                (13.6, y - 0.13),
                0.32,
                0.26,
                boxstyle="round,pad=0,rounding_size=0.05",
                facecolor=colour,
                edgecolor=EDGES[colour],
            )
        )
        axes.text(14.05, y, text, ha="left", va="center", fontsize=9.5)
    axes.text(13.6, 4.2, "1 to 4: messages, in order", ha="left", va="center", fontsize=9.5)
    return figure


if __name__ == "__main__":
    picture = Path(__file__).parent / "explanation/how_it_works.png"
    draw().savefig(picture, dpi=110, bbox_inches="tight", metadata={"Software": None})
