"""The kernels' benchmark for people: a table, a csv file and a roofline plot."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.timing import Roofline

Row = Mapping[str, Any]
COLUMNS = tuple(
    """
    op size implementation kind median_ms low_ms high_ms calls gb_per_s gflop_per_s
    of_roofline error allowed bytes flops problem
    """.split()
)


class CsvFile:
    """A table whose rows are in the file as soon as they are added, so a killed run keeps them.

    Args:
        columns: others of a row are left out.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(
            self._file, columns, restval="", extrasaction="ignore", lineterminator="\n"
        )
        self._writer.writeheader()
        self._file.flush()

    def add(self, rows: Sequence[Row]) -> None:
        self._writer.writerows(
            {name: _rounded(value) for name, value in row.items()} for row in rows
        )
        self._file.flush()


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def table(rows: Sequence[Row]) -> str:
    """Return markdown: implementations with their speed over each baseline of the same run."""
    lines = [
        "| op | size | by | median [ms] | quartiles | GB/s | GFLOP/s | of the roofline | speed "
        "over the library |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] == "baseline":
            continue
        start = f"| `{row['op']}` | {row['size']} | {row['implementation']} |"
        if "median_ms" not in row:
            why = row.get("problem") or f"error {row['error']:.2g}, allowed {row['allowed']:.2g}"
            lines.append(f"{start} **wrong**: {why} | | | | | |")
            continue
        others = [x for x in rows if x["kind"] == "baseline" and "median_ms" in x]
        others = [x for x in others if (x["op"], x["size"]) == (row["op"], row["size"])]
        faster = ", ".join(
            f"{x['median_ms'] / row['median_ms']:.2f} {x['implementation']}" for x in others
        )
        flops = f"{row['gflop_per_s']:.3g}" if row["flops"] else ""
        lines.append(
            f"{start} {row['median_ms']:.3g} | {row['low_ms']:.3g}..{row['high_ms']:.3g} | "
            f"{row['gb_per_s']:.3g} | {flops} | {row['of_roofline']:.0%} | {faster} |"
        )
    return "\n".join(lines)


def document(rows: Sequence[Row], roofline: Roofline, about: Mapping[str, str], name: str) -> str:
    """The whole page."""
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    return f"""# Kernels on {name}

{facts}
- roofline of the same run: copy {roofline.bytes_per_second / 1e9:.1f} GB/s (read and write
counted), product
  {roofline.flops_per_second / 1e9:.0f} GFLOP/s in {roofline.dtype}

Times are medians of calls, which alternate with calls of the library's equivalent. Bytes and FLOPs
are the smallest numbers that any implementation needs: half of X^T X, every input read once and
every output written once. "Of the roofline" is the time that the machine needs for these bytes and
FLOPs, divided by the measured time; it exceeds 100 % if data was still in a cache. An op with a
wrong result, compared with float64, has no speed.

![roofline]({name}.png)

{table(rows)}
"""


def draw(rows: Sequence[Row], roofline: Roofline, path: Path) -> None:
    """Draw FLOP/s over FLOPs per byte: our ops filled, the library hollow.

    Ops without FLOPs count as one for each element moved.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from benchmarks.pictures import save

    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    timed = [row for row in rows if "median_ms" in row]
    ops = list(dict.fromkeys(row["op"] for row in timed))
    colors = dict(zip(ops, plt.get_cmap("tab20").colors, strict=False))
    intensities = []
    for row in timed:
        flops = row["flops"] or row["bytes"] / 4
        intensities.append(flops / row["bytes"])
        ours = row["kind"] == "op"
        color = colors[row["op"]]
        axis.plot(
            intensities[-1],
            flops / row["median_ms"] / 1e6,
            ls="",
            marker="o" if ours else "s",
            color=color,
            markerfacecolor=color if ours else "none",
            ms=5 if ours else 6,
            alpha=0.8,
        )
    if intensities:
        low, high = (
            min(intensities) / 2,
            max(max(intensities), roofline.flops_per_second / roofline.bytes_per_second) * 2,
        )
        places = [low, roofline.flops_per_second / roofline.bytes_per_second, high]
        heights = [
            min(place * roofline.bytes_per_second, roofline.flops_per_second) / 1e9
            for place in places
        ]
        axis.plot(places, heights, color="black", lw=1.2)
    handles = [plt.Line2D([], [], ls="", marker="o", color=color) for color in colors.values()]
    handles.append(plt.Line2D([], [], ls="", marker="s", color="gray", markerfacecolor="none"))
    axis.legend(handles, [*ops, "the library's way"], fontsize=8, frameon=False)
    axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="GFLOP/s")
    axis.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, tight=False)
