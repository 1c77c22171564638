"""How much of the models that there are K-FAC steps: every architecture of transformers, and ten of
timm's models.

    python -m benchmarks.coverage [shares] [train] [report] [--only REGEX] [--again] ...

Without a phase: all of them. shares builds each model at its default size on the meta device and
counts; train makes a tiny one and trains it eight steps by KFACAdamW at ZeRO stages 0 and 2; report
writes docs/reference/models.md, and a page of all rows beside the results. A model is measured in a
process of its own, with a timeout, so that a crash is a row. Results are kept model by model, and
what is there is not measured again.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.coverage.architectures import TASKS, Architecture, architectures
from benchmarks.coverage.measure import STAGES, shares, trained
from benchmarks.coverage.report import all_rows, report
from benchmarks.distributed.ranks import SERVER, on_ranks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/coverage/models.json"
PAGE = ROOT / "docs/reference/models.md"
PACKAGES = ("torch", "deepspeed", "transformers", "timm")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "phases", nargs="*", metavar="phase", help=f"of {list(PHASES)}; default: all"
    )
    parser.add_argument("--only", default="", help="regex searched in names")
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="in that order"
    )
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--failed", action="store_true", help="measure what failed once more")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of a process")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(argv)
    if wrong := set(arguments.phases) - set(PHASES):
        parser.error(f"no such phase: {', '.join(sorted(wrong))}; choose from {', '.join(PHASES)}")
    arguments.phases = arguments.phases or list(PHASES)
    return arguments


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"versions": {}, "models": {}}


def write(path: Path, found: dict[str, Any]) -> None:
    """A line for each model."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found["models"].items())
    ]
    text = (
        '{\n "versions": '
        + json.dumps(found["versions"])
        + ',\n "models": {\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.rename(path)


def measured(function: Callable[..., Any], *arguments: Any, timeout: float) -> dict[str, Any]:
    """In a process of its own."""
    begin = time.monotonic()
    try:
        (found,) = on_ranks(function, 1, *arguments, timeout=timeout)
    except RuntimeError as problem:
        over = time.monotonic() - begin >= timeout
        found = {
            "error": f"over {timeout:.0f} s" if over else f"its process died: {problem}",
            "where": "process",
        }
    return found


def shares_phase(row: Architecture, timeout: float) -> dict[str, Any]:
    return measured(shares, row, timeout=timeout)


def train_phase(row: Architecture, timeout: float) -> dict[str, Any]:
    found = measured(trained, row, timeout=timeout)
    return dict.fromkeys(map(str, STAGES), found) if "error" in found else found


PHASES: dict[str, Callable[[Architecture, float], dict[str, Any]] | None] = {
    "shares": shares_phase,
    "train": train_phase,
    "report": None,
}


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    found = read(arguments.results)
    for name in arguments.phases:
        if (phase := PHASES[name]) is None:
            arguments.page.write_text(report(found))
            arguments.results.with_suffix(".md").write_text(all_rows(found))
            continue
        SERVER.set_forkserver_preload(["benchmarks.coverage.preload"])
        found["versions"] |= {package: version(package).partition("+")[0] for package in PACKAGES}
        chosen = [row for row in architectures().values() if row.task in arguments.tasks]
        for row in sorted(chosen, key=lambda row: arguments.tasks.index(row.task)):
            own = found["models"].setdefault(row.name, {"task": row.task, "head": row.head})
            known = name in own and not (arguments.failed and '"error"' in json.dumps(own[name]))
            if re.search(arguments.only, row.name) and (arguments.again or not known):
                own[name] = phase(row, arguments.timeout)
                write(arguments.results, found)
                print(row.name, json.dumps(own[name])[:300], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
