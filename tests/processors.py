"""Tests as other processors would compute them: the same sums in other orders.

    make processors              # every setting, with all of make quick, and engines
    python -m tests.processors --only shuffled -- tests/update tests/curvature

A setting makes torch, MKL and oneDNN use the instructions of another processor or more threads, or
permutes what is summed (tests/shuffled.py); "as it is" is what the others are compared with. Prints
the largest difference, in units of what is allowed (tests/close.py), and in how many tests it
differs from "as it is": none where a library has no such switch on this processor, as MKL's and
oneDNN's may have none on AMD. Ends with 1 if a test fails or uses more than LIMIT of what is
allowed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 0.3
"""Of what is allowed: the rest is for processors that nobody here has seen."""
PLAIN = "as it is"
SETTINGS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "MKL avx2": {"MKL_CBWR": "AVX2", "MKL_DEBUG_CPU_TYPE": "5"},
    "oneDNN sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "shuffled 1": {"SHUFFLED_SUMS": "1"},
    "shuffled 2": {"SHUFFLED_SUMS": "2"},
}
SHORT = ("tests/directions", "tests/update/test_moments.py", "tests/model/test_rows.py")
"""Products, sums, eigenvectors and orthogonal factors in seconds: what is run where no tests are
named."""


def report(
    name: str, ratios: dict[str, float], failed: list[str], plain: dict[str, float]
) -> tuple[str, bool]:
    """One line about a setting, lines about what is wrong in it, and whether anything is."""
    ordered = sorted(ratios.items(), key=lambda pair: -pair[1])
    changed = sum(ratio != plain.get(test) for test, ratio in ordered)
    largest = f"{ordered[0][1]:.3f} {ordered[0][0]}" if ordered else "nothing was compared"
    lines = [f"{name:20} {len(ratios)} compared, {changed} differently; largest {largest}"]
    lines += [f"    failed: {test}" for test in failed]
    over = [(test, ratio) for test, ratio in ordered if not ratio <= LIMIT]
    lines += [f"    over {LIMIT}: {ratio:.3f} {test}" for test, ratio in over]
    return "\n".join(lines), bool(failed or over or not ratios)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.processors", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[""], help="words of settings' names")
    add("selection", nargs="*", help="of tests, as pytest takes it, after --; default: a short one")
    options = parser.parse_args(argv)
    tests = options.selection or list(SHORT)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    plain: dict[str, float] = {}
    wrong = False
    for name, setting in SETTINGS.items():
        if not any(word in name for word in options.only):
            continue
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | setting
        with tempfile.NamedTemporaryFile() as kept:
            environment["RATIOS_FILE"] = kept.name
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            ratios = json.loads(Path(kept.name).read_text() or "{}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode not in (0, 1):
            failed.append(f"pytest: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        plain = plain or ratios
        text, bad = report(name, ratios, failed, plain)
        wrong |= bad
        print(text, flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
