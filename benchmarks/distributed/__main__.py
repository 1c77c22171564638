"""What K-FAC costs on several ranks: bytes, memory, collectives, and how even steps are.

    python -m benchmarks.distributed [bytes] [times] [report] [--worlds 1 2 4] ...

Without a phase all three run, a quarter of an hour on two idle cores. bytes counts a plain, an
updating and a refreshing step of every strategy and wire format, beside kfac-pytorch's figures.
times takes every step of whole refresh intervals, with refreshes all at once and staggered. Each
writes a JSON file in ``--out``, from which report makes tables and plots. Ranks are processes on
this machine, with gloo and one thread each.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.distributed.bytes import measure_bytes
from benchmarks.distributed.cases import MODEL, TINY, byte_cases, time_cases
from benchmarks.distributed.ranks import PRELOAD, SERVER, on_ranks
from benchmarks.distributed.report import report
from benchmarks.distributed.times import REFRESH, measure_times, over_ranks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/distributed"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="*", metavar="phase", help=f"of {[*PHASES, 'report']}")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="for bytes")
    parser.add_argument("--world", type=int, default=4, help="ranks, for times")
    parser.add_argument("--strategies", nargs="+", default=["ZeRO-2"], help="for times")
    parser.add_argument("--rows", type=int, default=8, help="windows of a rank, for times")
    parser.add_argument("--intervals", type=int, default=3, help="refresh intervals, for times")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if wrong := set(arguments.phases) - {*PHASES, "report"}:
        parser.error(f"no such phase: {', '.join(sorted(wrong))}")
    arguments.phases = arguments.phases or list(PHASES)
    arguments.model = TINY if arguments.tiny else MODEL
    return arguments


def bytes_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for world in arguments.worlds:
        cases = byte_cases(world)
        ranks = on_ranks(measure_bytes, world, cases, arguments.model)
        for index, case in enumerate(cases):
            row = {"strategy": case.strategy, "world": world, "wire": case.wire}
            row |= {"optimizer": case.optimizer, "ranks": [rows[index] for rows in ranks]}
            found.append(row)
    return found


def times_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, rows, intervals = arguments.model, arguments.rows, arguments.intervals
    found = []
    for strategy in arguments.strategies:
        modes, load = time_cases(strategy, arguments.world, REFRESH), os.getloadavg()[0]
        cases = [*modes.values()]
        ranks = on_ranks(measure_times, arguments.world, cases, model, rows, intervals)
        for mode, numbers in over_ranks(ranks, [*modes], intervals).items():
            row = {"strategy": strategy, "world": arguments.world, "mode": mode, **numbers}
            row |= {"tokens": rows * model.context, "intervals": intervals}
            found.append(row | {"load_before": load, "load_after": os.getloadavg()[0]})
    return found


PHASES: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "bytes": bytes_phase,
    "times": times_phase,
}


def circumstances(argv: list[str]) -> dict[str, Any]:
    """Return how the numbers were made, but not where they were written to."""
    import deepspeed
    import torch

    if "--out" in argv:
        at = argv.index("--out")
        argv = [*argv[:at], *argv[at + 2 :]]
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = f"torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    return {
        "command": shlex.join(["python", "-m", "benchmarks.distributed", *argv]),
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()}-core CPU, gloo",
        "versions": f"python {platform.python_version()}, {versions}",
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    SERVER.set_forkserver_preload([PRELOAD])
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, phase in PHASES.items():
        if name in arguments.phases:
            made = circumstances(sys.argv[1:] if argv is None else argv)
            made["rows"] = phase(arguments)
            (arguments.out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    print(report(arguments.out))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
