"""Several ranks that share one GPU, by gloo with CUDA tensors, train like tests/oracle.py in one
process: streams, what ranks exchange and ZeRO 0 to 3, on one device."""

import pytest

from tests.deepspeed.test_modes import check
from tests.ranks import run_apart

CASES = [("z0", 1), ("z1", 4), ("z2", 1), ("z3", 4), ("z2-bf16", 4)]
ADAM = [("adam-z1", 4), ("adam-z2-bf16", 4), ("adam-z3", 4)]
RUNS = [
    pytest.param("cuda", world, cases, marks=pytest.mark.gpu)
    for world in (2, 4)
    for cases in (CASES, ADAM)
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("device", "world", "cases"), [("cpu", 2, [("z2", 1), ("adam-z3", 4)]), *RUNS]
)
def test_ranks_that_share_a_device_match_the_reference(device, world, cases):
    target, start = "tests.deepspeed.runs:compare", "tests.gpu.shared:work"
    first, *_ = run_apart(target, start, world, device=device, payload=cases, timeout=400)
    assert len(first) == len(cases)
    for case, result in first.items():  # of rank 0, which has the reference
        check(case, result)
