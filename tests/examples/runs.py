"""Runs of the examples' scripts: their arguments, their tables, and main() on several ranks."""

import contextlib
import csv
import importlib
import io
from pathlib import Path

from tests.ranks import ROOT, free_port, run_ranks


def arguments_of(out: Path, config: str | Path, *flags: str, **options: object) -> list[str]:
    """Of a script; ``config`` is a path, or the name of a file of configs/."""
    path = config if isinstance(config, Path) else ROOT / f"configs/{config}.json"
    given = ["--deepspeed_config", str(path), "--out", str(out), *flags]
    for name, value in options.items():
        given += [f"--{name.replace('_', '-')}", str(value)]
    return given


def rows_of(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def losses_of(run: Path) -> list[float]:
    return [float(row["loss"]) for row in rows_of(run)]


def worker(payload: tuple[str, list[list[str]]]) -> list[tuple[int, str]]:
    """The exit code of each main() and what it printed. fp16 needs the CPU to pretend, and Muon is
    as Python runs it."""
    import torch._dynamo
    from deepspeed.accelerator import get_accelerator

    script, runs = payload
    get_accelerator().is_fp16_supported = lambda: True
    torch._dynamo.config.disable = True
    main, found = importlib.import_module(f"examples.{script}").main, []
    for arguments in runs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found.append((main(arguments), printed.getvalue()))
    return found


def run(script: str, *runs: list[str], world: int = 2) -> list[tuple[int, str]]:
    """What :func:`worker` says on the first rank; all ranks have its exit codes."""
    found = run_ranks("tests.examples.runs:worker", world=world, payload=(script, list(runs)))
    codes = [[code for code, _ in of_rank] for of_rank in found]
    assert codes == [codes[0]] * world
    return found[0]


def assert_trains(script: str, *runs: list[str], world: int = 2) -> None:
    for code, printed in run(script, *runs, world=world):
        assert code == 0, printed


def one_rank() -> dict[str, str]:
    """Variables of a launcher."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**single, "MASTER_PORT": str(free_port())}
