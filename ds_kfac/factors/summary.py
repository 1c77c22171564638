"""A table and a picture of factors: rows, effective rank and condition number of every side."""

import importlib
from pathlib import Path

import torch
from torch import Tensor

from ds_kfac.factors.files import Factors

HEADER = ("layer", "[O, I]", "rows", "A rank", "A cond", "G rank", "G cond")
SHOWN = 40
"""Most layers in a table."""


def effective_rank(values: Tensor) -> float:
    """(sum of the eigenvalues)^2 / sum of their squares: the number of directions if all nonzero ones were equal."""
    values = values.double().clamp(min=0)
    return float(values.sum() ** 2 / values.square().sum().clamp(min=1e-300))


def condition(values: Tensor) -> float:
    """Largest eigenvalue over the smallest that exceeds fp32 rounding."""
    values = values.double()
    floor = values.max() * torch.finfo(torch.float32).eps
    return float(values.max() / values[values > floor].min()) if values.max() > 0 else float("nan")


def spectrum(factors: Factors, layer: str, side: str) -> Tensor | None:
    """Eigenvalues, descending; None for an identity, or a factor without eigenvalues."""
    if (
        factors.side(layer, side).block == 0
        or f"{factors.layers[layer][side]['of']}/values" not in factors.header["weight_map"]
    ):
        return None
    return factors.eigenbasis(layer, side).values.sort(descending=True).values


def table(factors: Factors) -> list[str]:
    """Lines of a table with a row for each layer."""
    rows: list[tuple[str, ...]] = [HEADER]
    for layer in factors:
        shape = f"{factors.side(layer, 'G').dim:,} x {factors.side(layer, 'A').dim:,}"
        cells = [layer, shape, f"{factors.count(layer, 'A'):,.0f}" if factors.has(layer, "A") else ""]
        for side in "AG":
            values = spectrum(factors, layer, side)
            kind = factors.side(layer, side).kind
            empty = (kind, "") if kind == "identity" else ("zero", "")
            cells += empty if values is None else (f"{effective_rank(values):,.1f}", f"{condition(values):.1e}")
        rows.append(tuple(cells))
    shown = rows[: SHOWN + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    formats = [f"{{:{'<' if place == 0 else '>'}{width}}}" for place, width in enumerate(widths)]
    lines = ["  " + "  ".join(f.format(cell) for f, cell in zip(formats, row, strict=True)) for row in shown]
    more = [f"  and {len(rows) - len(shown):,} layers more, which are in index.json"] if len(rows) > len(shown) else []
    left = factors.header.get("left_alone", {})
    names = ", ".join(list(left)[:4]) + ", ..." * (len(left) > 4)
    return [*lines, *more, *([f"  left alone: {len(left)} modules, {names}"] if left else [])]


def draw(factors: Factors, path: Path) -> Path | None:
    """All spectra, A left and G right, from the first layer (dark) to the last; None without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        plots = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return None
    figure, axes = plots.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for axis, side, word in zip(axes, "AG", ("inputs", "output gradients"), strict=True):
        for place, layer in enumerate(factors):
            values = spectrum(factors, layer, side)
            if values is not None:
                share = values / values.sum()
                color = plots.get_cmap("viridis")(place / max(1, len(factors.layers) - 1))
                axis.plot(range(1, len(share) + 1), share.clamp(min=1e-12), color=color, linewidth=1, alpha=0.8)
        axis.set(
            title=f"{side}, {word}",
            xlabel="number of the eigenvalue, the largest first",
            xscale="log",
            yscale="log",
            ylim=(1e-10, 1.5),
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the trace")
    colors = plots.cm.ScalarMappable(plots.Normalize(0, len(factors.layers) - 1), cmap="viridis")
    figure.colorbar(colors, ax=axes, label="layer, in the model's order")
    figure.savefig(path, dpi=120)
    plots.close(figure)
    return path
