"""2,000 steps of KFACAdamW, killed (SIGKILL) at random moments and started again, beside a run in
one piece.

    python -m benchmarks.gpu_lm.kills [--kills 12] [--out FOLDER]

Both are ``benchmarks.gpu_lm`` with deterministic algorithms: each step's loss is to be the same
bits. A line for each life, then the first step that differs, if any. No GPU has run it.
"""

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_lm.plan import METHODS, PARTS

METHOD = "kfacadamw"
ROOT = Path(__file__).parents[2]


def life(
    out: Path, sizes: str, folders: list[str], save_every: float, after: float | None
) -> tuple[int, int]:
    """Start it; kill it once ``after`` seconds have passed since its first new row. Returns exit
    code and rows."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_lm",
        "a",
        "--methods",
        METHOD,
        "--sizes",
        sizes,
        "--out",
        str(out),
    ]
    command += [
        "--deterministic",
        "--one-rate",
        "--save-every",
        str(save_every),
        "--seconds",
        "1e5",
        *folders,
    ]
    table, before = path_of(out), len(losses(out))
    with (out / "log.txt").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            while (
                after is not None
                and process.poll() is None
                and (not table.exists() or len(losses(out)) <= before)
            ):
                before = min(before, len(losses(out)))  # rows after the last save are dropped
                time.sleep(0.01)
            if after is not None:
                time.sleep(after)
                process.send_signal(signal.SIGKILL)
            process.wait()
        finally:
            process.kill()
    return process.returncode, len(losses(out))


def path_of(out: Path) -> Path:
    return out / "runs" / f"a_{METHOD}_lr{METHODS[METHOD].rates[1]:g}_seed0.csv"


def losses(out: Path) -> list[str]:
    from benchmarks.gpu_lm.rows import rows_of

    return [row["loss"] for row in rows_of(path_of(out))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument(
        "--longest", type=float, default=10.0, help="seconds that a life trains at most"
    )
    parser.add_argument("--save-every", type=float, default=2.0)
    parser.add_argument("--sizes", choices=PARTS, default="kills")
    parser.add_argument("--folders", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folders = ["--folders", *options.folders] if options.folders else []
    whole, broken, dice = options.out / "whole", options.out / "broken", random.Random(0)
    for folder in (whole, broken):
        folder.mkdir(parents=True)
    if options.sizes == "small":
        options.kills, options.longest, options.save_every = min(options.kills, 2), 0.2, 0.0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    code, rows = life(whole, options.sizes, folders, 1e9, None)
    print(f"in one piece: exit code {code}, {rows} steps", flush=True)
    kills = 0
    for number in range(options.kills + 1):
        after = None if number == options.kills else dice.uniform(0, options.longest)
        code, rows = life(broken, options.sizes, folders, options.save_every, after)
        kills += code == -signal.SIGKILL
        print(f"life {number}: exit code {code}, {rows} steps", flush=True)
        if code >= 0:
            break
    expected, found = losses(whole), losses(broken)
    differing = [
        step
        for step, pair in enumerate(zip(expected, found, strict=False), 1)
        if pair[0] != pair[1]
    ]
    steps = PARTS[options.sizes]["a"].steps
    with (options.out / "kills.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", "whole", "broken"])
        table.writerows(
            [step, *pair] for step, pair in enumerate(zip(expected, found, strict=False), 1)
        )
    good = len(expected) == len(found) == steps and not differing and kills > 0
    said = (
        f"losses differ from step {differing[0]} on, in {len(differing)}"
        if differing
        else "no loss differs"
    )
    print(f"{kills} kills, {len(found)} of {steps} steps, {said}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
