"""The report's section on large models."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.distributed.cases import REFRESH, UPDATE
from benchmarks.distributed.plots import draw_simulation
from benchmarks.distributed.section import Row, Section, megabytes, milliseconds

SHOWN = (8, 64, 1024, 4096)
"""Ranks in the table; the plots and the csv file have all."""


def simulation_section(rows: Sequence[Row], out: Path) -> Section:
    links = list(rows[0]["seconds"])
    header = [
        "model",
        "strategy",
        "ranks",
        "workers",
        "imbalance",
        "statistics [MB per step]",
        "all [MB per step]",
        "state [GB]",
        "work [ms per step]",
        *(f"with {link} Gbit/s [ms per step]" for link in links),
    ]
    before = (
        f"Nothing of this was run. Factors every {UPDATE}, eigenbases every {REFRESH} steps, a "
        f"model of bf16 and bf16 "
        "on the wire, builtin rates of a GPU; averages per step."
    )
    return Section(
        "Large models, from the plan alone",
        before,
        header,
        [_cells(row, links) for row in rows],
        NOTES,
        draw_simulation(rows, out),
        shown=[row["world"] in SHOWN for row in rows],
    )


NOTES = (
    "Imbalance: K-FAC's work on the busiest rank over the mean. Bytes: of the rank that sends or "
    "receives most. "
    "With a link: work and bytes one after the other, without latency or overlap with the "
    "training step, which is "
    "not in it. A factor's batch comes from as many ranks as have 4 rows per column, near its "
    "eigen worker, so bytes "
    "do not grow with the ranks; with more ranks than factors some have nothing to do."
)


def _cells(row: Row, links: Sequence[str]) -> list[str]:
    return [
        row["model"],
        row["strategy"],
        str(row["world"]),
        str(row["workers"]),
        f"{row['imbalance']:.2f}",
        megabytes(row["statistics"]),
        megabytes(row["bytes"]),
        f"{row['memory'] / 1e9:.3g}",
        milliseconds(row["compute_seconds"]),
        *(milliseconds(row["seconds"][link]) for link in links),
    ]
