"""Compare every engine mode with tests/oracle.py on one device, for as long as there is time.

    python -m tests.gpu.modes --out FOLDER [--seconds 450] [--processes 8]     # a GPU, with NCCL
    python -m tests.gpu.modes --out FOLDER --device cpu --rehearse             # four modes, a
    minute

A case is a mode and a number of micro-batches. Each of its four steps is the engine's own, so on a
GPU the later ones replay CUDA graphs where the mode has them; the column "replays" counts them.
Cases whose reference is the same run go to the same process, which makes that reference once.

A case is a row of modes.csv when it is done, and the next call skips it. The last line says what
was left out.
"""

import argparse
import csv
import io
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, BY_NAME, MODES
from tests.ranks import run_alone

Case = tuple[str, int]
RESULT = ("difference", "bound", "replays", "wrapper")
COLUMNS = ("mode", "accumulation", *RESULT, "seconds", "problem")
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))
REHEARSED: list[Case] = [("z2-offload", 1), ("z3", 1), ("adam-z1-bf16", 4), ("adam-z0", 4)]
LAST_CASE = 20.0
"""Seconds that must be left for a case to be begun."""


def all_cases() -> list[list[Case]]:
    """Return the cases in groups that a process may mix: torch_autocast is global to a process.

    KFACAdamW has several micro-batches only: on one rank a single one has fewer rows than a factor
    is wide, whose null space has no unique basis.
    """
    groups = [[(mode.name, 4) for mode in ADAM]]
    groups[0] += [(mode.name, count) for mode in MODES for count in (1, 4)]
    for dtype in ("bfloat16", "float16"):
        cases = [(mode.name, 4) for mode in ADAM_AUTOCAST if mode.name.endswith(f"_{dtype}")]
        own = [mode for mode in AUTOCAST if mode.name.endswith(f"_{dtype}")]
        groups.append(cases + [(mode.name, count) for mode in own for count in (1, 4)])
    return groups


def dealt(groups: Sequence[Sequence[Case]], processes: int) -> list[list[Case]]:
    """Deal cases to processes; those with the same reference stay together."""
    plain, *autocast = groups
    alike: dict[tuple[str, int], list[Case]] = {}
    for name, accumulation in plain:
        alike.setdefault((BY_NAME[name].mathematics, accumulation), []).append((name, accumulation))
    hands: list[list[Case]] = [[] for _ in range(processes)]
    for cases in alike.values():
        min(hands, key=len).extend(cases)
    return [list(hand) for hand in (*hands, *autocast) if hand]


def work(payload: tuple[list[Case], float, str]) -> int:
    """Compare cases until the time is up; runs in a process of its own. Returns how many it did."""
    from tests.deepspeed.runs import compare
    from tests.deepspeed.test_modes import check

    cases, ends, path = payload
    done = 0
    for case in cases:
        begin = time.monotonic()
        if begin > ends - LAST_CASE:
            break
        row: dict[str, Any] = {"mode": case[0], "accumulation": case[1]}
        try:
            result = compare([case])[case]
            row |= {key: result[key] for key in RESULT}
            check(case, result)
        except Exception as problem:
            row["problem"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        append(Path(path), row | {"seconds": time.monotonic() - begin})
        done += 1
    return done


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line in one write: several processes share the file."""
    text = io.StringIO()
    short = {
        key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()
    }
    csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n").writerow(short)
    with path.open("a") as file:
        file.write(text.getvalue())


def read(path: Path) -> dict[Case, dict[str, str]]:
    """Return the rows of all calls so far, of a case that was run again the last one."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n")
    with path.open(newline="") as file:
        return {(row["mode"], int(row["accumulation"])): row for row in csv.DictReader(file)}


def run(options: argparse.Namespace) -> int:
    """Return 1 if a case is wrong."""
    ends = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "modes.csv"
    known = {case for case, row in read(path).items() if not row["problem"]}
    groups = [REHEARSED] if options.rehearse else all_cases()
    missing = [[case for case in group if case not in known] for group in groups]
    hands = dealt(missing, options.processes)

    def hand_out(item: tuple[int, list[Case]]) -> str:
        number, cases = item
        limit = max(1.0, ends - time.monotonic())
        payload = (cases, ends, str(path))
        try:
            run_alone("tests.gpu.modes:work", device=options.device, payload=payload, timeout=limit)
        except AssertionError as problem:  # a process died: its rows are there all the same
            return f"process {number}: {problem}"
        return ""

    with ThreadPoolExecutor(max(1, len(hands))) as pool:
        deaths = [text for text in pool.map(hand_out, enumerate(hands)) if text]
    rows = read(path)
    wrong = [f"{row['mode']}: {row['problem']}" for row in rows.values() if row["problem"]]
    left_out = [case for group in groups for case in group if case not in rows]
    replayed = sum(int(row["replays"] or 0) > 0 for row in rows.values())
    print("\n".join([*deaths, *wrong]), flush=True)
    print(f"{len(rows)} cases compared, {len(wrong)} wrong, {replayed} with replayed steps")
    names = ", ".join(f"{name} x{count}" for name, count in left_out)
    print(f"left out, the same command goes on: {names or 'nothing'}", flush=True)
    return 1 if wrong or deaths else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=450.0, help="of the whole call")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="that share the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="a few modes only")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
