"""The page on several ranks: tables, csv files and plots, from the JSON files of the phases."""

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.distributed.cases import (
    KFAC_PYTORCH,
    KFAC_PYTORCH_WORLD,
    KFAC_PYTORCH_WORST,
    REFRESH,
    UPDATE,
)
from benchmarks.distributed.times import REFRESH as TIMED_REFRESH
from benchmarks.pictures import save

Row = Mapping[str, Any]
MB = 1e6
STEPS = ("plain", "update", "refresh")
WAYS = ("sent", "received")
KINDS = {
    "factors": ("factors",),
    "bases": ("eigenvectors", "eigenvalues"),
    "gradients": ("gradients",),
    "results": ("results",),
}
BYTES_HEADER = [
    *("ranks", "strategy", "optimizer", "wire"),
    *(f"{kind} [MB]" for kind in KINDS),
    *("payload [MB]", "to torch.distributed [MB]", "kfac-pytorch's payload [MB]"),
    *("collectives plain / update / refresh", "state [MB]", "kfac-pytorch's state [MB]"),
]
BYTES_NOTES = """The columns from factors to results have the bytes of one kind, sent by the rank
that sends most of this kind. Payload is the sum over all kinds, for the rank that sends or
receives most, without data that stays on the rank. "To torch.distributed" is the number of bytes
that torch.distributed was asked to move between ranks, counted by wrapping it. It includes the
padding of messages to 16 bytes; gloo and NCCL also add headers. Collectives: the refreshing step
is the first one, which also has up to two all-reduces for the proof of captured rows; later
steps rarely have these. State is the size of factors and eigenbases on the rank that holds most.
KFACAdamW's moments are not included, because they replace the optimizer's. kfac-pytorch's
payload is the size of the fp32 tensors in the collectives in which a rank takes part; a ring
all-reduce puts up to twice as many bytes on the wire."""
TIMES_HEADER = [
    *("strategy", "ranks", "refreshes", "median [ms]", "mean [ms]", "worst [ms]"),
    *("worst / median", "processor worst / median", "factors refreshed", "payload [MB]"),
    *("most collectives", "load before / after"),
]
TIMES_NOTES = """Wall clock is the time of the slowest rank, from a common start. All ranks share
the machine's cores with all other programs that run there (load). Processor seconds count
the threads of the busiest rank. Modes run in turn, step by step. Payload is per step, averaged over
the whole interval."""


def amortised(rank: Row, way: str) -> dict[str, float]:
    """Return kind -> payload bytes per step of one rank."""
    plain, update, refresh = (rank[step][way] for step in STEPS)
    return {
        kind: plain.get(kind, 0)
        + (update.get(kind, 0) - plain.get(kind, 0)) / UPDATE
        + (refresh.get(kind, 0) - update.get(kind, 0)) / REFRESH
        for kind in sorted(refresh.keys() | update.keys() | plain.keys())
    }


def payload(case: Row) -> float:
    """Return bytes per step of the rank that sends or receives most."""
    return max(sum(amortised(rank, way).values()) for rank in case["ranks"] for way in WAYS)


def wire_bytes(case: Row) -> float:
    """Return the same as torch.distributed moved it."""
    found = []
    for rank in case["ranks"]:
        for place in (0, 1):
            plain, update, refresh = (rank[step]["wire"][place] for step in STEPS)
            found.append(plain + (update - plain) / UPDATE + (refresh - update) / REFRESH)
    return max(found)


def compares(case: Row) -> bool:
    """Whether kfac-pytorch's figures are of the same model, ranks and factors."""
    same_ranks = case["world"] == KFAC_PYTORCH_WORLD
    return same_ranks and case["optimizer"] == "AdamW" and case["strategy"] in KFAC_PYTORCH


def bytes_section(rows: Sequence[Row], out: Path) -> list[str]:
    size = rows[0]["ranks"][0]
    cells = [_byte_cells(case) for case in rows]
    write_csv(out / "bytes.csv", BYTES_HEADER, cells)
    draw_payload(rows, out / "payload.png")
    return [
        "## Bytes, collectives and memory",
        "",
        f"The table has MB per rank for a GPT of {size['parameters'] / 1e6:.1f} M parameters, "
        f"{size['gradient'] / 1e6:.2f} M of them preconditioned. They are means over all steps, "
        f"with factors every {UPDATE} and eigenbases every {REFRESH} steps.",
        "",
        *table(BYTES_HEADER, cells),
        f"![payload]({out.name}/payload.png)",
        "",
        BYTES_NOTES,
        "",
    ]


def _byte_cells(case: Row) -> list[str]:
    ranks = case["ranks"]
    kinds = [amortised(rank, "sent") for rank in ranks]
    sent = [
        max(sum(kind.get(name, 0) for name in names) for kind in kinds) for names in KINDS.values()
    ]
    calls = [max(sum(rank[step]["wrapped_calls"].values()) for rank in ranks) for step in STEPS]
    theirs = [f"{x:g}" for x in KFAC_PYTORCH[case["strategy"]]] if compares(case) else ["", ""]
    return [
        str(case["world"]),
        case["strategy"],
        case["optimizer"],
        case["wire"],
        *map(megabytes, sent),
        megabytes(payload(case)),
        megabytes(wire_bytes(case)),
        theirs[0],
        " / ".join(map(str, calls)),
        megabytes(max(rank["state"] for rank in ranks)),
        theirs[1],
    ]


def times_section(rows: Sequence[Row], out: Path) -> list[str]:
    cells = [_time_cells(row) for row in rows]
    write_csv(out / "times.csv", TIMES_HEADER, cells)
    draw_times(rows, out / "steps.png")
    return [
        "## Steps without spikes",
        "",
        f"Every step of whole refresh intervals, factors every {UPDATE} and eigenbases every "
        f"{TIMED_REFRESH} steps, {rows[0]['tokens']} tokens a rank. The same step of "
        f"{rows[0]['intervals']} intervals does the same work, and the fastest of them counts. "
        f"kfac-pytorch's worst step took {KFAC_PYTORCH_WORST:g} medians.",
        "",
        *table(TIMES_HEADER, cells),
        f"![steps]({out.name}/steps.png)",
        "",
        TIMES_NOTES,
        "",
    ]


def _time_cells(row: Row) -> list[str]:
    wall, processor = row["wall"], row["processor"]
    has_kfac = "payload" in row
    return [
        row["strategy"],
        str(row["world"]),
        row["mode"],
        f"{1e3 * statistics.median(wall):.0f}",
        f"{1e3 * statistics.fmean(wall):.0f}",
        f"{1e3 * max(wall):.0f}",
        f"{max(wall) / statistics.median(wall):.2f}",
        f"{max(processor) / statistics.median(processor):.2f}",
        f"{row['refreshes']:g}" if has_kfac else "",
        megabytes(row["payload"]) if has_kfac else "",
        str(row["calls"]) if has_kfac else "",
        f"{row['load_before']:.1f} / {row['load_after']:.1f}",
    ]


SECTIONS = {"bytes": bytes_section, "times": times_section}


def report(out: Path) -> str:
    """Write the page next to the folder, csv files and plots into it; return the page."""
    lines = ["# Several ranks", "", "From benchmarks/distributed. MB are 10^6 bytes.", ""]
    for name, section in SECTIONS.items():
        path = out / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            lines += section(found["rows"], out)
            made = f"Made by `{found['command']}` at commit {found['commit']} on {found['date']}"
            lines += [f"{made}: {found['machine']}; {found['versions']}.", ""]
    text = "\n".join(lines)
    (out.parent / f"{out.name}.md").write_text(text)
    return text


def draw_payload(rows: Sequence[Row], path: Path) -> None:
    """Draw stacked bars: kfac-pytorch's payload, then ours in bf16, of the rank with most of it."""
    ours = [
        case
        for case in rows
        if case["wire"] == "bf16" and case["optimizer"] == "AdamW" and case["world"] > 2
    ]
    bars: list[tuple[str, dict[str, float]]] = [
        (f"kfac-pytorch\n{case['strategy']}\nfp32", {"all": KFAC_PYTORCH[case["strategy"]][0]})
        for case in ours
        if compares(case)
    ]
    for case in ours:
        flows = (amortised(rank, way) for rank in case["ranks"] for way in WAYS)
        most = max(flows, key=lambda flow: sum(flow.values()))
        parts = {
            kind: sum(most.get(name, 0) for name in names) / MB for kind, names in KINDS.items()
        }
        bars.append((f"{case['strategy']}\nbf16", parts))
    figure, axis = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    colors = dict(zip(("all", *KINDS), ("0.75", "C0", "C1", "C2", "C4"), strict=True))
    for place, (_, parts) in enumerate(bars):
        bottom = 0.0
        for kind, value in parts.items():
            axis.bar(place, value, 0.62, bottom, color=colors[kind])
            bottom += value
        axis.annotate(f"{bottom:.3g}", (place, bottom), ha="center", va="bottom", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axis.legend(handles, ["all of kfac-pytorch", *KINDS], fontsize=9, frameon=False)
    axis.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=9)
    axis.set_ylabel("payload of a rank [MB per step]")
    save(figure, path, tight=False)


def draw_times(rows: Sequence[Row], path: Path) -> None:
    """Draw the seconds of every step, a panel for each mode."""
    figure, axes = plt.subplots(
        1,
        len(rows),
        figsize=(3.6 * len(rows), 2.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, axis in zip(rows, axes[0], strict=True):
        middle = statistics.median(row["wall"])
        axis.plot([1e3 * seconds for seconds in row["wall"]], lw=0.9)
        axis.axhline(1e3 * middle, color="black", lw=0.7, ls=":")
        worst = max(row["wall"]) / middle
        axis.set_title(f"{row['strategy']}, {row['mode']}: worst {worst:.2f} medians", fontsize=9)
        axis.set_xlabel("step of the interval")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("ms a step")
    save(figure, path, tight=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def megabytes(nbytes: float) -> str:
    return f"{nbytes / MB:.3g}" if nbytes < 100 * MB else f"{nbytes / MB:.0f}"
