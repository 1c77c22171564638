"""Every engine mode trains like tests/oracle.py on one GPU, with NCCL at world 1; on a CPU two do.

NCCL does not allow several ranks on one GPU: what happens between ranks is tested with gloo, in
tests/deepspeed/test_modes.py. Each of a case's four steps is the engine's own, so on a GPU the
later ones replay CUDA graphs where the mode has them.

MODES in the environment names a folder: a case is a file there as soon as it is done, and the next
run skips it. modes.csv has all of them. MODES_UNTIL is the time, in seconds since the epoch, after
which no case is begun; the test then fails and names what it left out.
"""

import csv
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, BY_NAME, MODES
from tests.deepspeed.test_modes import check
from tests.ranks import run_alone

Case = tuple[str, int]
"""A mode and a number of micro-batches."""
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))


def dealt() -> list[list[Case]]:
    """All cases, for processes that share the device; those with the same reference stay together,
    and torch_autocast is global to a process.

    KFACAdamW has several micro-batches only: on one rank a single one has fewer rows than a factor
    is wide, whose null space has no unique basis.
    """
    alike: dict[object, list[Case]] = {}
    for mode in (*ADAM, *MODES, *ADAM_AUTOCAST, *AUTOCAST):
        for accumulation in (4,) if mode.adam else (1, 4):
            own = mode.extra.get("torch_autocast", {}).get("dtype")
            key = own or (BY_NAME[mode.name].mathematics, accumulation)
            alike.setdefault(key, []).append((mode.name, accumulation))
    autocast = [alike.pop(dtype) for dtype in ("bfloat16", "float16")]
    hands: list[list[Case]] = [[] for _ in range(PROCESSES)]
    for cases in alike.values():
        min(hands, key=len).extend(cases)
    return hands + autocast


def at_once(function: Callable[[list[Case]], dict], hands: list[list[Case]]) -> dict:
    """What a function returns of each hand, run in threads."""
    with ThreadPoolExecutor(len(hands)) as pool:
        return {case: found for part in pool.map(function, hands) for case, found in part.items()}


def compare(payload: tuple[list[Case], str]) -> dict:
    """Results of the cases; of those that are no files yet, each is written as it comes."""
    from tests.deepspeed.runs import compared

    (cases, folder), results = payload, {}
    until = float(os.environ.get("MODES_UNTIL", "inf"))
    for case in cases:
        path = Path(folder, "{}-{}.json".format(*case))
        if not path.exists():
            if time.time() > until:
                continue
            path.write_text(json.dumps(compared(*case)))
        results[case] = json.loads(path.read_text())
    return results


def write_table(folder: str, results: dict[Case, dict]) -> None:
    with Path(folder, "modes.csv").open("w", newline="") as file:
        names = ["mode", "accumulation", "difference", "bound", "replays", "wrapper"]
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        for (mode, accumulation), result in sorted(results.items()):
            table.writerow({"mode": mode, "accumulation": accumulation, **result})


DEVICES = [
    pytest.param("cpu", [[("z2-offload", 1)], [("adam-z0", 4)]]),
    pytest.param("cuda", dealt(), marks=pytest.mark.gpu),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("device", "hands"), DEVICES, ids=["cpu", "cuda"])
def test_every_engine_mode_matches_reference_on_one_device(device, hands, tmp_path):
    """Tolerances are those of the CPU, with TF32 off."""
    folder = os.environ.get("MODES", str(tmp_path))

    def compared(cases: list[Case]) -> dict:
        target = "tests.gpu.test_modes:compare"
        return run_alone(target, device=device, payload=(cases, folder), timeout=3000)

    results = at_once(compared, hands)
    write_table(folder, results)
    left_out = sorted({case for hand in hands for case in hand} - results.keys())
    assert not left_out, f"left out: {left_out}"
    for case, result in results.items():
        check(case, result)
    replayed = [case for case, result in results.items() if result["replays"]]
    assert bool(replayed) == (device == "cuda"), "a GPU replays CUDA graphs"
