"""The report's section on steps without spikes."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.distributed.cases import KFAC_PYTORCH_WORST, UPDATE, WORST_TARGET
from benchmarks.distributed.plots import draw_times
from benchmarks.distributed.section import Row, Section, Verdict, megabytes, milliseconds
from benchmarks.distributed.times import REFRESH

SAME_WORK = 0.02
HEADER = (
    "strategy",
    "ranks",
    "refreshes",
    "median [ms]",
    "mean [ms]",
    "worst [ms]",
    "worst / median",
    "95 % / median",
    "processor median [ms]",
    "processor worst / median",
    "factors refreshed",
    "payload [MB]",
    "most collectives",
    "stages in the median / worst step [ms]",
    "load before / after",
)


def times_section(rows: Sequence[Row], out: Path) -> Section:
    before = (
        f"Every step of whole refresh intervals, factors every {UPDATE} and eigenbases every "
        f"{REFRESH} steps, "
        f"{rows[0]['tokens']} tokens a rank: all modes do the same work. Of the same step of "
        f"{rows[0]['intervals']} "
        f"intervals the fastest counts. kfac-pytorch's worst step was {KFAC_PYTORCH_WORST:g} "
        f"medians."
    )
    return Section(
        "Steps without spikes",
        before,
        HEADER,
        [_cells(row) for row in rows],
        NOTES,
        [draw_times(rows, out / "steps.png")],
        _verdicts(rows),
    )


NOTES = (
    "Wall clock of the slowest rank, from a common start; all ranks share the machine's cores, "
    "with whatever else "
    "runs there (load). Processor seconds: of the rank that spends most, its threads included; "
    "other programs "
    "disturb them less. Modes are run in turn, step by step. Payload: per step, over the whole "
    "interval. Stages: of "
    "the rank that spends most in each; waiting for another rank counts where it happens."
)


def ratio(seconds: Sequence[float]) -> float:
    """Of the worst to the median."""
    return max(seconds) / statistics.median(seconds)


def _cells(row: Row) -> list[str]:
    wall, processor = row["wall"], row["processor"]
    middle = statistics.median(wall)
    stages = (
        f"{name} {milliseconds(a)} / {milliseconds(b)}"
        for name, (a, b) in row.get("stages", {}).items()
        if a or b
    )
    refreshes = f"{row['refreshes']:g}" if "refreshes" in row else ""
    payload = megabytes(max(row["payload"])) if "payload" in row else ""
    return [
        row["strategy"],
        str(row["world"]),
        row["mode"],
        milliseconds(middle),
        milliseconds(statistics.fmean(wall)),
        milliseconds(max(wall)),
        f"{ratio(wall):.2f}",
        f"{statistics.quantiles(wall, n=20)[-1] / middle:.2f}",
        milliseconds(statistics.median(processor)),
        f"{ratio(processor):.2f}",
        refreshes,
        payload,
        str(row.get("calls", "")),
        ", ".join(stages),
        f"{row['load_before']:.1f} / {row['load_after']:.1f}",
    ]


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for row in rows:
        if not row["mode"].startswith("staggered"):
            continue
        for clock, name in (("wall", "wall clock"), ("processor", "processor seconds")):
            worst = ratio(row[clock])
            claim = (
                f"worst step, {name}, {row['strategy']}, {row['mode']}; kfac-pytorch "
                f"{KFAC_PYTORCH_WORST:g}"
            )
            found.append(
                Verdict(claim, f"<= {WORST_TARGET} medians", f"{worst:.2f}", worst <= WORST_TARGET)
            )
        base = next(
            r for r in rows if (r["strategy"], r["mode"]) == (row["strategy"], "all at once")
        )
        payloads = max(row["payload"]) / max(base["payload"]) if max(base["payload"]) else 1.0
        same = row["refreshes"] == base["refreshes"] and abs(payloads - 1) <= SAME_WORK
        found.append(
            Verdict(
                f"same average work as all at once, {row['strategy']}, {row['mode']}",
                f"{base['refreshes']:g} factors refreshed, payload within {SAME_WORK:.0%}",
                f"{row['refreshes']:g}, {payloads - 1:+.2%}",
                same,
            )
        )
    return found
