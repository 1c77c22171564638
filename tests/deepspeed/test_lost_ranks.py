"""A rank that raises or dies in K-FAC's step: the others' errors name it, and what it was doing."""

import os
import signal
from contextlib import suppress

import pytest
import torch.distributed as dist

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def worker(what: str) -> None:
    engine = build(BY_NAME["z3"], 1)
    train(engine, 1, steps=1)
    curvature = engine.kfac.preconditioner.curvature

    def decompose(*ignored) -> None:
        if what == "raises":
            raise ArithmeticError("no such factor")
        os.kill(os.getpid(), signal.SIGKILL)

    if what == "raised before":  # on all ranks, which go on
        what, plain, curvature.decompose = "raises", curvature.decompose, decompose
        with suppress(ArithmeticError):
            train(engine, 1, steps=3, first=1)
        what, curvature.decompose = "dies", plain
        train(engine, 1, steps=1, first=engine.kfac.job.steps)
    if dist.get_rank() == 1:
        curvature.decompose = decompose
    train(engine, 1, steps=3, first=1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raises", "rank 1 raised in K-FAC's step (refresh): ArithmeticError: no such factor"),
        ("dies", "rank 1 did not come"),
        ("raised before", "rank 1 did not come"),
    ],
)
def test_the_other_ranks_name_the_one_that_is_lost(what, words):
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.deepspeed.test_lost_ranks:worker", world=3, payload=what, after=20.0)
    logs = str(caught.value).split("--- rank ")[1:]
    for log in (logs[0], logs[2]):
        (line,) = [
            line for line in log.splitlines() if line.startswith("ds_kfac.comm.lost.LostRank: ")
        ]
        assert "gradients could not be exchanged" in line and words in line, line
