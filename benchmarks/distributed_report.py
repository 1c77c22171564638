"""Tables of the distributed benchmark, from the JSON files of its phases."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distributed_bytes_report import bytes_section, megabytes, milliseconds, table
from benchmarks.distributed_cases import REFRESH, UPDATE, WORST_TARGET
from benchmarks.distributed_plots import draw_simulation, draw_times
from benchmarks.distributed_training import smoothed

Row = Mapping[str, Any]


def report(out: Path) -> str:
    """Write a markdown file beside the folder, and plots into it; returns the markdown."""
    lines = ["# Several ranks", "", "From benchmarks/distributed.py. MB are 10^6 bytes.", ""]
    for name, section in SECTIONS.items():
        path = out / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            made = f"Made by `{found['command']}` at {found['commit']} on {found['date']}: {found['machine']}; "
            lines += [*section(found["rows"], out), f"{made}{found['versions']}.", ""]
    text = "\n".join(lines)
    (out.parent / f"{out.name}.md").write_text(text)
    return text


def times_section(rows: Sequence[Row], out: Path) -> list[str]:
    cells = []
    for row in rows:
        wall, processor = statistics.median(row["wall"]), statistics.median(row["processor"])
        ratio = max(row["wall"]) / wall
        judged = ("met" if ratio <= WORST_TARGET else "MISSED") if row["mode"].startswith("staggered") else ""
        cells.append([
            row["strategy"], str(row["world"]), row["mode"], milliseconds(wall), milliseconds(max(row["wall"])),
            f"{ratio:.2f}", judged, f"{statistics.quantiles(row['wall'], n=20)[-1] / wall:.2f}",
            milliseconds(statistics.fmean(row["wall"])), milliseconds(processor),
            f"{max(row['processor']) / processor:.2f}", f"{row['refreshes']:g}" if "refreshes" in row else "",
            megabytes(max(row["payload"])) if "payload" in row else "", str(row.get("calls", "")),
            ", ".join(f"{name} {1000 * a:.0f} / {1000 * b:.0f}" for name, (a, b) in row.get("stages", {}).items()),
            f"{row['load_before']:.1f} / {row['load_after']:.1f}",
        ])  # fmt: skip
    header = ["strategy", "ranks", "refreshes", "median [ms]", "worst [ms]", "worst / median", f"<= {WORST_TARGET}",
              "95 % / median", "mean [ms]", "processor median [ms]", "processor worst / median", "refreshed factors",
              "payload [MB]", "most collectives", "stages in the median / worst step [ms]", "load"]  # fmt: skip
    plot = draw_times(rows, out / "steps.png")
    return [
        "## Steps without spikes", "",
        f"Every step of one whole refresh interval, {REFRESH} steps, so that all modes do the same work.", "",
        *table(header, cells), f"![seconds of every step]({out.name}/{plot.name})", "",
        "Wall clock of the slowest rank, from a common start; processor seconds of one process, threads included,",
        "which other programs on the machine disturb less. Modes are run in turn, step by step, but for the one with",
        "lag. Stages: of the rank that spends most in each; waiting for another rank counts where it happens.", "",
    ]  # fmt: skip


def adaptive_section(rows: Sequence[Row], out: Path) -> list[str]:
    cells = []
    for row in rows:
        base = next(r for r in rows if r["optimizer"] == row["optimizer"] and r["run"] == "every step")
        part = sum(row["sent"]["factors"]) / sum(base["sent"]["factors"])
        change = row["held_out"] / base["held_out"] - 1
        judged = "" if row is base else "met" if part <= 0.25 and change <= 0.01 else "MISSED"
        cells.append([
            row["optimizer"], row["run"], str(len(row["losses"])), f"{part:.1%}", str(row["counts"]["refreshes"]),
            f"{row['held_out']:.4f}", f"{change:+.2%}", f"{smoothed(row['losses']):.4f}", judged,
        ])  # fmt: skip
    header = ["optimizer", "statistics", "steps", "traffic of them", "refreshes of rank 0", "held-out loss", "change",
              "training loss, last tenth", "<= 25 % within 1 %"]  # fmt: skip
    return ["## Adaptive statistics", "", "The GPT example, factors at every step or as the adaptive rule says.", "",
            *table(header, cells)]  # fmt: skip


def options_section(rows: Sequence[Row], out: Path) -> list[str]:
    cells = []
    for row in rows:
        base = next(r for r in rows if r["optimizer"] == row["optimizer"] and r["run"] == "plain")
        change = row["held_out"] / base["held_out"] - 1
        judged = "" if row is base else "met" if change <= 0.01 else "MISSED"
        cells.append([
            row["optimizer"], row["run"], str(row["world"]), str(len(row["losses"])), f"{row['held_out']:.4f}",
            f"{change:+.2%}", f"{smoothed(row['losses']):.4f}", judged,
            megabytes(max(map(sum, zip(*row["sent"].values(), strict=True)))),
        ])  # fmt: skip
    header = ["optimizer", "run", "ranks", "steps", "held-out loss", "change", "training loss, last tenth",
              "within 1 %", "sent by a rank [MB]"]  # fmt: skip
    return [
        "## Every option on", "",
        "HYBRID with fp16 statistics and bf16 gradients on the wire, error feedback, staggered refreshes with lag,",
        "the adaptive rule, warm start, shared inputs, split factors, sums sent during backward; against none.", "",
        *table(header, cells),
    ]  # fmt: skip


def simulation_section(rows: Sequence[Row], out: Path) -> list[str]:
    files = draw_simulation(rows, out)
    worlds = sorted({row["world"] for row in rows})
    shown = [world for world in (8, 64, 1024) if world in worlds] or worlds
    links = list(rows[0]["seconds"])
    cells = [
        [row["model"], row["strategy"], str(row["world"]), str(row["workers"]), f"{row['imbalance']:.2f}",
         megabytes(row["bytes"]), f"{row['memory'] / 1e9:.3g}", milliseconds(row["compute_seconds"]),
         *(milliseconds(row["seconds"][link]) for link in links)]
        for row in rows if row["world"] in shown
    ]  # fmt: skip
    header = ["model", "strategy", "ranks", "workers", "imbalance", "MB per step", "state [GB]", "work [ms]",
              *(f"{link} Gbit/s [ms]" for link in links)]  # fmt: skip
    return [
        "## Large models, from the plan alone", "",
        f"Nothing of this was run. Factors every {UPDATE}, eigenbases every {REFRESH} steps, a model of bf16 and bf16",
        "on the wire, rates of an A100 as published, work and bytes one after the other, no latency; per step on average.",
        "",
        *table(header, cells), *(f"![{file.stem}]({out.name}/{file.name})" for file in files), "",
    ]  # fmt: skip


SECTIONS: Mapping[str, Callable[[Sequence[Row], Path], list[str]]] = {
    "bytes": bytes_section,
    "times": times_section,
    "adaptive": adaptive_section,
    "options": options_section,
    "simulate": simulation_section,
}
