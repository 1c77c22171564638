"""What K-FAC costs on several ranks: bytes, memory, collectives and steps without spikes; and large
models simulated.

    python -m benchmarks.distributed [bytes] [times] [rows] [adaptive] [options] [simulate] [report]
    ...

Without a phase: all of them, half an hour on two idle cores. bytes counts a plain, an update and a
refresh step of every strategy and wire format; times takes every step of a whole refresh interval,
with refreshes all at once and staggered; rows, adaptive and options train the GPT example; simulate
plans large models on up to 1024 ranks. Each writes a JSON file in --out, from which report makes
tables and plots. Ranks are processes on this machine (gloo, CPU), one thread each.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distributed.bytes import measure_bytes
from benchmarks.distributed.cases import MODEL, TINY, byte_cases
from benchmarks.distributed.ranks import PRELOAD, SERVER, on_ranks
from benchmarks.distributed.report import report
from benchmarks.distributed.simulation import MODELS, WORLDS, simulate
from benchmarks.distributed.times import measure_times, over_ranks, time_modes
from benchmarks.distributed.training import Training, adaptive_runs, option_runs, rows_runs, train
from examples.gpt import GPTConfig

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/distributed"
RunsOf = Callable[[str, int, Sequence[int], Sequence[Any]], list[Training]]
TRAINED = GPTConfig(width=128, blocks=4, context=128)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "phases", nargs="*", metavar="phase", help=f"of {list(PHASES)}; default: all"
    )
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="ranks, for bytes")
    parser.add_argument(
        "--world", type=int, default=4, help="ranks, for times and options; adaptive takes two"
    )
    parser.add_argument("--strategies", nargs="+", default=["ZeRO-2"], help="for times")
    parser.add_argument("--rows", type=int, default=8, help="windows of a rank and step, for times")
    parser.add_argument(
        "--intervals",
        type=int,
        default=3,
        help="refresh intervals to time; of equal steps the fastest",
    )
    parser.add_argument(
        "--optimizers", nargs="+", default=["KFACAdamW"], help="for adaptive and options"
    )
    parser.add_argument("--rows-world", type=int, default=8, help="ranks, for rows")
    parser.add_argument("--rows-steps", type=int, default=150)
    parser.add_argument(
        "--factor-rows", nargs="+", type=int, default=[1024, 512, 256], help="of a factor, for rows"
    )
    parser.add_argument("--rows-seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--adaptive-steps", type=int, default=200)
    parser.add_argument("--tolerances", nargs="+", type=float, default=[0.3], help="for adaptive")
    parser.add_argument("--option-steps", type=int, default=200)
    parser.add_argument("--option-strategies", nargs="+", default=["HYBRID"], help="for options")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="for adaptive and options"
    )
    parser.add_argument(
        "--data",
        help="text file or folder to train on; default: the Python standard library's sources",
    )
    parser.add_argument("--simulated-worlds", nargs="+", type=int, default=list(WORLDS))
    parser.add_argument("--simulated-models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model everywhere, to try the benchmark itself"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if wrong := set(arguments.phases) - set(PHASES):
        parser.error(f"no such phase: {', '.join(sorted(wrong))}; choose from {', '.join(PHASES)}")
    arguments.phases = arguments.phases or list(PHASES)
    return arguments


def bytes_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, found = TINY if arguments.tiny else MODEL, []
    for world in arguments.worlds:
        cases = byte_cases(world)
        ranks = on_ranks(measure_bytes, world, cases, model)
        for index, case in enumerate(cases):
            keys = {
                "strategy": case.strategy,
                "world": world,
                "wire": case.wire,
                "optimizer": case.optimizer,
            }
            found.append({**keys, "ranks": [rows[index] for rows in ranks]})
    return found


def times_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model, found = TINY if arguments.tiny else MODEL, []
    for strategy in arguments.strategies:
        modes, load = time_modes(strategy, arguments.world), os.getloadavg()[0]
        cases = [*modes.values()]
        ranks = on_ranks(
            measure_times, arguments.world, cases, model, arguments.rows, arguments.intervals
        )
        for name, numbers in over_ranks(ranks, [*modes], arguments.intervals).items():
            found.append(
                {
                    "strategy": strategy,
                    "world": arguments.world,
                    "mode": name,
                    "tokens": arguments.rows * model.context,
                    "intervals": arguments.intervals,
                    **numbers,
                    "load_before": load,
                    "load_after": os.getloadavg()[0],
                }
            )
            print(f"{strategy}, {name}: {summary(numbers['wall'])}", flush=True)
    return found


def summary(seconds: list[float]) -> str:
    middle = sorted(seconds)[len(seconds) // 2]
    return f"median {middle:.3f} s, worst {max(seconds):.3f} s, {max(seconds) / middle:.2f} times"


def adaptive_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return _trained(
        arguments, adaptive_runs, arguments.adaptive_steps, arguments.seeds, arguments.tolerances, 2
    )


def rows_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    steps, seeds, world = arguments.rows_steps, arguments.rows_seeds, arguments.rows_world
    return _trained(arguments, rows_runs, steps, seeds, arguments.factor_rows, world)


def options_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    steps, seeds, strategies = arguments.option_steps, arguments.seeds, arguments.option_strategies
    return _trained(arguments, option_runs, steps, seeds, strategies, arguments.world)


def _trained(
    arguments: argparse.Namespace,
    runs_of: RunsOf,
    steps: int,
    seeds: list[int],
    varied: Sequence[Any],
    world: int,
) -> list[dict[str, Any]]:
    """One row a run of every optimizer; "sent" of every rank."""
    runs = [
        run
        for optimizer in arguments.optimizers
        for run in runs_of(optimizer, steps, seeds, varied)
    ]
    model, found = TINY if arguments.tiny else TRAINED, []
    ranks = on_ranks(train, world, runs, model, max(1, 16 // world), arguments.data)
    for rows in zip(*ranks, strict=True):
        sent = {kind: [row["sent"].get(kind, 0) for row in rows] for kind in rows[0]["sent"]}
        found.append({**rows[0], "world": world, "sent": sent})
    return found


def simulate_phase(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return simulate(arguments.simulated_worlds, arguments.simulated_models)


PHASES: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]] | None] = {
    "bytes": bytes_phase,
    "times": times_phase,
    "rows": rows_phase,
    "adaptive": adaptive_phase,
    "options": options_phase,
    "simulate": simulate_phase,
    "report": None,
}


def circumstances(argv: list[str]) -> dict[str, Any]:
    """With what and how numbers were made; wherever they were written to."""
    import deepspeed
    import torch

    if "--out" in argv:
        at = argv.index("--out")
        argv = [*argv[:at], *argv[at + 2 :]]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "command": shlex.join(["python", "-m", "benchmarks.distributed", *argv]),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()}-core CPU, gloo",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, deepspeed "
        f"{deepspeed.__version__}",
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    SERVER.set_forkserver_preload([PRELOAD])
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.phases:
        if (phase := PHASES[name]) is not None:
            made = circumstances(sys.argv[1:] if argv is None else argv)
            rows = phase(arguments)
            (arguments.out / f"{name}.json").write_text(
                json.dumps({**made, "rows": rows}, indent=1) + "\n"
            )
    print(report(arguments.out))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
