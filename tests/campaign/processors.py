"""The comparisons with tests/oracle.py as other processors would compute them.

    python -m tests.campaign.processors                  # every setting, about 15 minutes on 2 idle cores
    python -m tests.campaign.processors --only avx2 "2 threads"

A setting makes torch, MKL and oneDNN use the instructions of another processor, or sums in another order. Prints the
largest difference, in units of what is allowed (tests/spread.py), of every group of cases. Ends with 1 if one is
over 1.
"""

import argparse
import json
import os
import subprocess
import sys

from tests.ranks import run_ranks

SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATen avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "MKL avx2": {"MKL_CBWR": "AVX2", "MKL_DEBUG_CPU_TYPE": "5"},
    "oneDNN sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "everything default": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "everything avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
}
MODES = ("z0", "z2", "z3", "z2-bf16", "z2-fp16", "adam-z1", "adam-z2-all_reduce", "adam-z2-bf16", "adam-z0-fp16")
GROUPS = ("corrected", "adam", "mixed", "stacked", "")
"""Of the cases of test_features, by a word of their names; the first that fits."""


def measure() -> dict[str, float]:
    """Group of cases -> largest difference / allowed."""
    from tests.deepspeed.test_features import CASES

    found: dict[str, float] = {}

    def note(group: str, value: float, bound: float) -> None:
        found[group] = max(found.get(group, 0.0), value / bound)

    worker = "tests.deepspeed.test_features:worker"
    for (name, _), (error, bound, *_) in run_ranks(worker, world=2, payload=(list(CASES), ["z2"]))[0].items():
        note("features " + next(word for word in GROUPS if word in name), error, bound)
    cases = [(name, 4) for name in MODES]
    for (name, _), result in run_ranks("tests.deepspeed.runs:compare", world=2, payload=cases)[0].items():
        kind = next((dtype for dtype in ("bf16", "fp16") if dtype in name), "fp32")
        note(f"modes {kind}", result["difference"], result["bound"])
    for name, result in run_ranks("tests.deepspeed.test_inverse:worker", world=2)[0].items():
        note("inverse on the wire" if "wire" in name else "inverse", result["difference"], result["bound"])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.processors", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="words of settings' names")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(measure()))
        return 0
    worst = 0.0
    for name, setting in SETTINGS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | setting
        command = [sys.executable, "-m", "tests.campaign.processors", "--here"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: failed\n{done.stderr[-2000:]}")
            worst = float("inf")
            continue
        ratios = json.loads(done.stdout.splitlines()[-1])
        worst = max(worst, *ratios.values())
        print(f"{name:20}", *(f"{group} {ratio:.2f}" for group, ratio in ratios.items()), sep="  ", flush=True)
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main())
