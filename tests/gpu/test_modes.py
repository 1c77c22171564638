"""Every engine mode trains like tests/oracle.py on one GPU, with NCCL at world 1; the runner itself
on a CPU.

Several ranks on one GPU are not possible with NCCL: what happens between ranks is tested with gloo,
in ``tests/deepspeed/test_modes.py``.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deepspeed.modes import ADAM, ADAM_AUTOCAST, AUTOCAST, MODES
from tests.deepspeed.test_modes import check
from tests.ranks import run_alone

pytestmark = pytest.mark.distributed
TARGET = "tests.deepspeed.runs:compare"
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))


def batches() -> list[list[tuple[str, int]]]:
    """All cases of one rank, dealt to processes; torch_autocast is global to a process, so each
    dtype has its own."""
    plain = [(mode.name, accumulation) for mode in MODES for accumulation in (1, 4)]
    # a null space has no unique basis, see tests/deepspeed/test_modes.py
    plain += [(mode.name, 4) for mode in ADAM]
    found = [plain[index::PROCESSES] for index in range(PROCESSES)]
    for dtype in ("bfloat16", "float16"):
        cases = [
            (mode.name, count)
            for mode in AUTOCAST
            if mode.name.endswith(f"_{dtype}")
            for count in (1, 4)
        ]
        found.append(
            cases + [(mode.name, 4) for mode in ADAM_AUTOCAST if mode.name.endswith(f"_{dtype}")]
        )
    return found


def on_the_gpu(target: str) -> dict:
    """Case -> what ``target`` finds, of all cases."""
    results: dict = {}
    with ThreadPoolExecutor(PROCESSES) as pool:
        for part in pool.map(
            lambda batch: run_alone(target, device="cuda", payload=batch), batches()
        ):
            results |= part
    return results


def check_all(results: dict) -> None:
    for case, result in results.items():
        check(case, result)


def test_no_mode_is_left_out():
    dealt = [case for batch in batches() for case in batch]
    assert len(dealt) == len(set(dealt))
    assert {name for name, _ in dealt} == {
        mode.name for mode in MODES + AUTOCAST + ADAM + ADAM_AUTOCAST
    }


@pytest.mark.gpu
def test_every_engine_mode_matches_reference_on_one_gpu():
    """Tolerances are those of the CPU, with TF32 off. Prints every difference."""
    results = on_the_gpu(TARGET)
    for (name, accumulation), result in sorted(results.items()):
        print(
            f"{name} accumulation {accumulation}: {result['difference']:.2e}, {result['wrapper']}"
        )
    check_all(results)
    assert any(result["nu"] < 0.9 for result in results.values()), (
        "kl-clip never acted, so it was not tested"
    )


def test_the_runner_works_in_a_process_of_its_own():
    cases = [("z2-offload", 1), ("z3", 1), ("adam-z1-bf16", 4)]
    results = run_alone(TARGET, device="cpu", payload=cases)
    assert list(results) == cases
    check_all(results)


def test_a_process_that_fails_says_why():
    with pytest.raises(AssertionError, match="KeyError: 'no such mode'"):
        run_alone(TARGET, device="cpu", payload=[("no such mode", 1)])
