"""What the kernels are meant to reach on a GPU with 16-bit rows, and whether the rows of a run
do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """Attributes:
    over: baseline that is to take so many times as long; None: part of the roofline.
    sides: smallest and largest D, of ops that have one.
    """

    op: str
    wanted: float
    over: str | None = None
    sides: tuple[int, int] | None = None

    def applies(self, row: Row) -> bool:
        if row["op"] != self.op or row["kind"] != "op":
            return False
        return (
            self.sides is None
            or self.sides[0] <= int(row["size"].rsplit("D ", 1)[-1]) <= self.sides[1]
        )

    def reached(self, row: Row, rows: Sequence[Row]) -> float:
        """NaN where what it is measured against was not timed."""
        if self.over is None:
            return row["of_roofline"]
        timed = [x for x in rows if "median_ms" in x]
        same = [
            x
            for x in timed
            if (x["op"], x["size"], x["implementation"]) == (self.op, row["size"], self.over)
        ]
        return same[0]["median_ms"] / row["median_ms"] if same else math.nan


LARGE = 1 << 20
GOALS = (
    Goal("syrk_accumulate_", 1.7, "mm", (4096, LARGE)),
    Goal("syrk_accumulate_", 2.0, "mm, average, pack", (4096, LARGE)),
    Goal("syrk_accumulate_", 1.3, "mm", (2048, 4095)),
    Goal("syrk_accumulate_", 1.7, "mm, average, pack", (2048, 4095)),
    Goal("syrk_accumulate_", 1.0, "mm", (1, 2047)),
    Goal("syrk_accumulate_", 1.5, "mm, average, pack", (1, 2047)),
    Goal("symmetric_pack_into_", 0.85),
    Goal("symmetric_unpack_from", 0.85),
    Goal("ema_update_", 0.85),
)


def goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per goal and size, by the fastest implementation that is right; ``met`` False where
    none is."""
    found = []
    for goal in GOALS:
        for size in dict.fromkeys(row["size"] for row in rows if goal.applies(row)):
            tried = [
                row
                for row in rows
                if goal.applies(row) and row["size"] == size and "median_ms" in row
            ]
            best = min(tried, key=lambda row: row["median_ms"], default=None)
            reached = goal.reached(best, rows) if best else 0.0
            found.append(
                {
                    "op": goal.op,
                    "size": size,
                    "over": goal.over or "roofline",
                    "wanted": goal.wanted,
                    "reached": reached,
                    "by": best["implementation"] if best else "nothing",
                    "met": reached >= goal.wanted,
                }
            )
    return found


def goals_table(found: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| op | size | measured against | wanted | reached | by | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        form = "{:.0%}" if row["over"] == "roofline" else "{:.2f}x"
        cells = [f"`{row['op']}`", row["size"], row["over"], form.format(row["wanted"])]
        cells.append("not timed" if math.isnan(row["reached"]) else form.format(row["reached"]))
        lines.append(
            f"| {' | '.join(cells)} | {row['by']} | {'pass' if row['met'] else '**fail**'} |"
        )
    return "\n".join(lines)
