"""Factors on two ranks, of models at every ZeRO stage: those of one process over all data, whatever
the engine."""

import os

import pytest
import torch
from torch import nn

from ds_kfac.factors.files import Factors, FactorsError
from tests.close import close, exact, near
from tests.factors.test_fit import Sequences, fit, sequences
from tests.factors.worker import batches, config, model
from tests.ranks import free_port, run_ranks

pytestmark = pytest.mark.distributed
COUNT = 5
"""Of batches: the second rank has one less."""
MODES = {
    "whole": None,
    **{f"stage {stage}": config(stage, optimizer=True) for stage in range(4)},
    "stage 0, no optimizer": config(0, optimizer=False),
    "stage 3, no optimizer": config(3, optimizer=False),
    "stage 3, offloaded": config(3, optimizer=False, offload=True),
    "stage 2, bf16": config(2, optimizer=True, dtype="bf16"),
    "stage 3, bf16": config(3, optimizer=False, dtype="bf16"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("factors")
    payload = {"modes": MODES, "out": str(out), "batches": COUNT}
    return out, run_ranks("tests.factors.worker:main", world=2, payload=payload)


@pytest.mark.parametrize("mode", MODES)
def test_every_stage_gives_the_factors_of_the_whole_model(made, mode):
    out, said = made
    whole, found = Factors.load(out / "whole"), Factors.load(out / mode)
    assert found.header["sequences"] == 3 * COUNT
    for name in whole:
        for side in "AG":
            own, expected = found.factor(name, side), whole.factor(name, side)
            if "bf16" in mode:
                bound = 0.05 * expected.abs().max()
                near(own, expected, bound, "weights, rows and gradients have 8 bits")
            else:
                exact(own, expected)
        if "bf16" not in mode:
            exact(found.corrected(name), whole.corrected(name))
    for rank in said:
        assert rank[mode]["grads"] == rank[mode]["moved"] == 0
        assert rank[mode]["training"]


def test_two_ranks_give_what_one_process_gives(made, tmp_path):
    out, _ = made
    whole = Factors.load(out / "whole")
    alone = fit(model(), batches(COUNT), out=tmp_path)
    for name in alone:
        for side in "AG":
            # of COUNT * 24 rows, sums of ranks and batches in another order
            close(whole.factor(name, side), alone.factor(name, side), sums=24 * COUNT)
            assert whole.count(name, side) == alone.count(name, side)


SPOILT = {
    "nan": "rank 1, batch 1: the loss is nan",
    "vector": "rank 1, batch 1: the loss is no scalar: got shape [2, 1]",
    "apart": "rank 1, batch 1: its loss depends on no layer",
    "number": "rank 1, batch 1: ValueError: no tensor that has a dimension",
    "raises": "rank 1, batch 1: RuntimeError: no memory",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_problem_of_one_rank_stops_all(tmp_path, how):
    """At stage 3 others must not wait for its weights; an error in the loss ends its rank there."""
    names = ("whole", "stage 3, no optimizer")[: 1 if how == "raises" else 2]
    modes = {mode: MODES[mode] for mode in names}
    payload = {"modes": modes, "out": str(tmp_path), "batches": COUNT, "spoils": how}
    said = run_ranks("tests.factors.worker:main", world=2, payload=payload)
    assert said[0] == said[1]
    for mode in modes:
        assert SPOILT[how] in said[0][mode]


def test_a_rank_without_batches_helps_the_others(made, tmp_path):
    """At stage 3 they fetch its weights."""
    modes = {mode: MODES[mode] for mode in ("whole", "stage 3, no optimizer")}
    payload = {"modes": modes, "out": str(tmp_path), "batches": COUNT, "idle": True}
    run_ranks("tests.factors.worker:main", world=2, payload=payload)
    spread = Factors.load(made[0] / "whole")
    for mode in modes:
        found = Factors.load(tmp_path / mode)
        assert found.header["sequences"] == 3 * COUNT
        for name in found:
            close(found.factor(name, "G"), spread.factor(name, "G"), sums=24 * COUNT)


def other_layers(out: str) -> str:
    own = nn.Sequential(nn.Linear(4, 4 + torch.distributed.get_rank()))
    with pytest.raises(FactorsError) as problem:
        fit(own, [torch.ones(2, 4)], lambda own, x: own(x).sum(), out=out)
    return str(problem.value)


def test_ranks_with_other_layers_are_told(tmp_path):
    said = run_ranks(
        "tests.factors.test_ranks:other_layers", world=2, payload=str(tmp_path), timeout=60
    )
    assert all("ranks have different layers" in text for text in said)


def joins(payload: dict) -> float:
    # as in a script of a launcher, which has not joined its job
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = payload["port"]  # the last job's store may still be there
    return fit(Sequences(), sequences(2), out=payload["out"]).header["sequences"]


def test_a_launched_script_that_has_not_joined_its_job_does(tmp_path):
    payload = {"out": str(tmp_path), "port": str(free_port())}
    said = run_ranks("tests.factors.test_ranks:joins", world=2, payload=payload, timeout=60)
    assert said == [12, 12]
