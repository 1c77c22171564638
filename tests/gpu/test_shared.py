"""Several ranks that share one GPU, by gloo with CUDA tensors, train like tests/oracle.py in one
process: streams, what ranks exchange and ZeRO 0 to 3, on one device."""

import pytest

from tests.deepspeed.test_modes import check
from tests.gpu.shared import run_together

pytestmark = pytest.mark.distributed
TARGET = "tests.deepspeed.runs:compare"
CASES = {
    "kfac": [("z0", 1), ("z1", 4), ("z2", 1), ("z3", 4), ("z2-bf16", 4)],
    "adam": [("adam-z1", 4), ("adam-z2-bf16", 4), ("adam-z3", 4)],
}


def held(results: list[dict]) -> None:
    """Rank 0 has the reference."""
    for case, result in results[0].items():
        check(case, result)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu_match_the_reference(rule, world):
    held(run_together(TARGET, world=world, device="cuda", payload=CASES[rule]))


@pytest.mark.parametrize("target", [TARGET, "tests.gpu.shared:compare_staged"])
def test_the_runner_and_its_way_by_copies_work_on_a_cpu(target):
    held(run_together(target, world=2, device="cpu", payload=[("z2", 1), ("adam-z3", 4)]))


def test_a_rank_that_fails_says_why():
    with pytest.raises(AssertionError, match="KeyError: 'no such mode'"):
        run_together(TARGET, world=2, device="cpu", payload=[("no such mode", 1)])
