"""What K-FAC costs in a step, by the tokens of a rank: GPT-2 small and medium on one device, beside
what is predicted.

    python benchmarks/step_tokens.py [--seconds 500] [--out FOLDER]    # again, until it says that all is done
    python benchmarks/step_tokens.py --dry-run                         # what is to be measured, and what it takes

Micro-batches of 32,768 tokens, accumulated above that. K-FAC's methods run with the plan that a run
has by default, which spreads long refreshes over steps, and with all at once. A measurement is of a
whole refresh interval (of ten steps without K-FAC), and is in the csv file when it is done; one
that no time was left for, or that failed, is made in the next call. The mean is of the interval.
K-FAC's milliseconds are the mean minus AdamW's median; what `ds_kfac estimate` predicts stands
beside them.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and os.environ.get("DS_ACCELERATOR") == "cpu":
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import step_gpu
from benchmarks.mean_step import REFRESH, ROW
from benchmarks.step_gpu import GPT2, first_of, has_kfac
from ds_kfac.estimate.command import costs_of
from ds_kfac.estimate.estimates import Estimate
from ds_kfac.estimate.subject import Subject, Trace
from examples.gpt import GPTConfig

COLUMNS = [
    "model",
    "tokens",
    "method",
    "plan",
    "what",
    "median_ms",
    "low_ms",
    "high_ms",
    "count",
    "memory_mb",
    "overhead",
    "predicted_overhead",
    "kfac_ms",
    "predicted_kfac_ms",
    "predicted_over_measured",
    "device",
    "problem",
]
CONTEXT, MICRO, VOCABULARY = 1024, 32_768, 50304
MODELS = {"gpt2_small": (768, 12, 12), "gpt2_medium": (1024, 24, 16)}
"""Width, blocks, heads."""
TINY = {"gpt2_small": (16, 1, 2), "gpt2_medium": (32, 2, 2)}
TOKENS = 32_768, 8_192, 131_072, 524_288
"""Of GPT-2 small, in order of worth; the first one of the medium one, too."""
PLAIN_STEPS = 10
ACCUMULATED_FIRST = 2
"""Steps that are not timed where each has several micro-batches; with K-FAC first refreshes, which
are by eigh, are."""
DEFAULT, AT_ONCE = "default", "all at once"
KINDS = [
    ("AdamW", ""),
    ("KFACAdamW", DEFAULT),
    ("K-FAC into AdamW", DEFAULT),
    ("Muon", ""),
    ("KFACAdamW", AT_ONCE),
    ("K-FAC into AdamW", AT_ONCE),
]
ASSUMED_MS, STARTS = 90.0, 8.0
"""Of AdamW's step of 32,768 tokens by GPT-2 small on an H100, before it was measured; seconds to
build and compile."""
FACTORS = {"Muon": 1.6, "KFACAdamW": 1.6, "K-FAC into AdamW": 2.3}
"""Of AdamW's steps of 32,768 tokens: what a mean one of another method may take."""


class Cell(NamedTuple):
    """A measurement."""

    model: str
    tokens: int
    method: str
    plan: str


def cells(tokens: Sequence[int]) -> list[Cell]:
    places = [*(("gpt2_small", count) for count in tokens), ("gpt2_medium", tokens[0])]
    return [Cell(*place, *kind) for place in places for kind in KINDS]


def sizes(options: argparse.Namespace, cell: Cell) -> argparse.Namespace:
    """Arguments as of benchmarks/step_gpu.py."""
    width, blocks, heads = (TINY if options.tiny else MODELS)[cell.model]
    accumulation = max(1, cell.tokens // options.micro)
    rows, vocabulary = (
        cell.tokens // accumulation // options.context,
        11 if options.tiny else VOCABULARY,
    )
    return argparse.Namespace(
        width=width,
        blocks=blocks,
        heads=heads,
        context=options.context,
        vocabulary=vocabulary,
        rows=rows,
        accumulation=accumulation,
        stage=1,
        kfac="{}",
        batched=None,
        staggered=cell.plan != AT_ONCE,
    )


def steps_of(options: argparse.Namespace, cell: Cell) -> tuple[int, int]:
    """Steps before those that are timed, and these."""
    first = ACCUMULATED_FIRST if cell.tokens > options.micro else first_of(cell.method)
    return first, REFRESH if has_kfac(cell.method) else PLAIN_STEPS


def expected(options: argparse.Namespace, cell: Cell, rows: Sequence[dict[str, str]]) -> float:
    """Seconds that it takes, by AdamW's steps so far: what other methods add does not grow with
    accumulation."""
    known = {
        (row["model"], int(row["tokens"])): float(row["median_ms"])
        for row in rows
        if row["method"] == "AdamW" and row["what"] == "step"
    }
    first = known.get((cell.model, options.micro))
    if first is None:
        first = known.get(("gpt2_small", options.micro), ASSUMED_MS) * (
            2.8 if cell.model == "gpt2_medium" else 1.0
        )
    own = known.get((cell.model, cell.tokens), first * cell.tokens / options.micro)
    return (
        STARTS
        + sum(steps_of(options, cell)) * (own + first * (FACTORS.get(cell.method, 1.0) - 1)) / 1e3
    )


def measure(
    options: argparse.Namespace, cell: Cell, ends: float
) -> tuple[list[tuple[str, float]], float] | None:
    """(kind, seconds) of every timed step, and the peak of memory in MB; None: there was no
    time."""
    first, count = steps_of(options, cell)
    own, times = sizes(options, cell), list[tuple[str, float]]()
    get_accelerator().reset_peak_memory_stats()
    with step_gpu.engine_of(own, cell.method, stage=1) as engine:
        for index in range(first + count):
            name = step_gpu.kind(engine)
            seconds = step_gpu.step(engine, own, index)
            if index >= first:
                times.append((name, seconds))
            if time.monotonic() > ends:
                return None
    return times, get_accelerator().max_memory_allocated() / 1e6


def predicted(options: argparse.Namespace, cell: Cell) -> Estimate:
    """What ``ds_kfac estimate`` says of the same config, model and tokens."""
    own = sizes(options, cell)
    config = step_gpu.config_of(own, cell.method, stage=1)
    with torch.device("meta"):
        model = GPT2(GPTConfig(own.width, own.blocks, own.heads, own.context), own.vocabulary)
        x = torch.zeros(1, own.context, dtype=torch.long)
    subject = Subject(model, config, trace=Trace(model, (x, x)))
    costs = costs_of("cuda" if options.gpu or options.tiny else "cpu", options.costs)
    return Estimate(subject, costs, 1, cell.tokens)


def rows_of(
    cell: Cell,
    times: list[tuple[str, float]],
    memory: float,
    base: float | None,
    estimate: Estimate | None,
):
    """Rows of a measurement. ``base``: milliseconds of AdamW's step at these tokens."""
    by_kind: dict[str, list[float]] = {}
    for name, seconds in times:
        by_kind.setdefault(name, []).append(1e3 * seconds)
    for name, values in by_kind.items():
        low, middle, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
        row = {
            "what": name,
            "median_ms": middle,
            "low_ms": low,
            "high_ms": high,
            "count": len(values),
        }
        yield row | {
            "memory_mb": memory,
            **({} if base is None else {"overhead": middle / base - 1}),
        }
    if has_kfac(cell.method):
        mean = 1e3 * statistics.fmean(seconds for _, seconds in times)
        row = {"what": ROW, "median_ms": mean, "count": len(times), "memory_mb": memory}
        if base is not None:
            row |= {"overhead": mean / base - 1, "kfac_ms": mean - base}
            if estimate is not None:
                kfac = 1e3 * estimate.seconds
                row |= {
                    "predicted_kfac_ms": kfac,
                    "predicted_overhead": kfac / base,
                    "predicted_over_measured": kfac / (mean - base),
                }
        yield row


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows of a measurement at once: one of which any is there is done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if file.tell() == 0:
            table.writeheader()
        table.writerows(
            {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )


def cell_of(row: dict[str, str]) -> Cell:
    return Cell(row["model"], int(row["tokens"]), row["method"], row["plan"])


def done(rows: Sequence[dict[str, str]], *, failed: bool = False) -> set[Cell]:
    """What was measured, or failed."""
    return {cell_of(row) for row in rows if bool(row["problem"]) == failed}


def page(rows: Sequence[dict[str, str]]) -> str:
    """Markdown, in the order of models and tokens."""
    head = [
        "model",
        "tokens",
        "method",
        "plan",
        "ms a step",
        "to AdamW's",
        "memory, GB",
        "K-FAC, ms",
        "predicted",
        "predicted / measured",
    ]
    lines = [
        "# A step by the tokens of a rank",
        "",
        ", ".join(sorted({row["device"] for row in rows})),
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda row: (row["model"] != "gpt2_small", int(row["tokens"]))):
        if row["what"] not in ("step", ROW, "failed") or (
            row["problem"] and cell_of(row) in done(rows)
        ):
            continue
        known = {key: float(row[key]) for key in COLUMNS[5:15] if row[key]}
        cells = [
            row["model"],
            f"{int(row['tokens']):,}",
            row["method"],
            row["plan"],
            row["problem"],
        ]
        cells += [""] * 5
        for at, key, how in (
            (4, "median_ms", "{:.4g}"),
            (5, "overhead", "{:+.1%}"),
            (7, "kfac_ms", "{:.3g}"),
            (8, "predicted_kfac_ms", "{:.3g}"),
            (9, "predicted_over_measured", "{:.2f}"),
        ):
            cells[at] = how.format(known[key]) if key in known else cells[at]
        cells[6] = f"{known['memory_mb'] / 1e3:.3g}" if "memory_mb" in known else ""
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![overhead by tokens](tokens.png)", ""])


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """What a mean step of GPT-2 small is more than AdamW's, over tokens; dashed what is
    predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for color, (method, plan) in zip(plt.get_cmap("tab10").colors, KINDS[1:], strict=False):
        own = [
            row
            for row in rows
            if (row["model"], row["method"], row["plan"]) == ("gpt2_small", method, plan)
        ]
        own = sorted(
            (row for row in own if row["what"] in ("step", ROW)), key=lambda row: int(row["tokens"])
        )
        for column, style in (("overhead", "-o"), ("predicted_overhead", "--x")):
            points = [(int(row["tokens"]), 100 * float(row[column])) for row in own if row[column]]
            if points:
                label = f"{method}, {plan}" if plan else method
                label += "" if column == "overhead" else ", predicted"
                axis.plot(*zip(*points, strict=True), style, color=color, label=label)
    axis.set(xscale="log", xlabel="tokens of a rank in a step", ylabel="more than AdamW's step [%]")
    axis.axhline(100 * step_gpu.TARGET, color="gray", lw=0.8)
    axis.grid(alpha=0.3)
    if axis.get_lines()[:-1]:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run(options: argparse.Namespace) -> int:
    """Number of measurements that failed."""
    path, failed, ends = options.out / "tokens.csv", 0, time.monotonic() + options.seconds
    rows = read(path)
    missing = [cell for cell in cells(options.tokens) if cell not in done(rows)]
    missing.sort(key=lambda cell: cell in done(rows, failed=True))  # these last
    if options.dry_run:
        seconds = [expected(options, cell, rows) for cell in missing]
        for cell, each in zip(missing, seconds, strict=True):
            print(
                f"{cell.model} {cell.tokens:,} tokens, {cell.method} {cell.plan}".rstrip()
                + f": {each:.0f} s"
            )
        print(f"{len(missing)} measurements, {sum(seconds):.0f} s")
        return 0
    options.gpu = step_gpu.start()
    device = torch.cuda.get_device_name() if options.gpu else "CPU"
    for cell in missing:
        rows = read(path)
        needs = 0.0 if options.tiny else expected(options, cell, rows)
        if time.monotonic() + needs > ends:
            continue  # a shorter one may be behind it
        adamw = cell._replace(method="AdamW", plan="")
        base = next(
            (
                float(row["median_ms"])
                for row in rows
                if row["what"] == "step" and cell_of(row) == adamw
            ),
            None,
        )
        common = {**cell._asdict(), "device": device}
        try:
            found = measure(options, cell, ends)
            if found is None:
                continue
            estimate = predicted(options, cell) if has_kfac(cell.method) else None
            add(path, [common | row for row in rows_of(cell, *found, base, estimate)])
        except Exception as problem:
            failed += 1
            text = f"{type(problem).__name__}: {problem}".splitlines()[0]
            add(path, [common | {"what": "failed", "problem": text}])
            if "CUDA error" in text:  # nothing works in this process any more
                print(text, flush=True)
                break
        last = read(path)[-1]
        print(*(f"{key} {value}" for key, value in last.items() if value), flush=True)
    rows = read(path)
    if rows:
        draw(rows, options.out / "tokens.png")
        (options.out / "tokens.md").write_text(page(rows))
        print(page(rows))
    left = [cell for cell in missing if cell not in done(rows)]
    print(
        f"{len(left)} measurements are left: the same command goes on"
        if left
        else "all measurements are done"
    )
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, help=f"of a rank in a step; default: {TOKENS}"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and few tokens, to see that it works"
    )
    parser.add_argument(
        "--costs",
        type=Path,
        help="rates that benchmarks/kernels/costs.py measured, for predictions",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which the call ends"
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    options = parser.parse_args(arguments)
    options.context, options.micro = (5, 10) if options.tiny else (CONTEXT, MICRO)
    options.tokens = options.tokens or ((10, 5, 40) if options.tiny else TOKENS)
    if wrong := [
        n for n in options.tokens if n % (options.micro if n > options.micro else options.context)
    ]:
        parser.error(
            f"--tokens {wrong[0]}: not of whole texts of {options.context}, or micro-batches of "
            f"{options.micro}"
        )
    return 1 if run(options) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads now and then abort at exit
