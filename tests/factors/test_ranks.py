"""Factors that several ranks compute, each of its own batches, are those of the rule over all data,
whatever the engine."""

import os
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from ds_kfac.factors.files import Factors, FactorsError
from tests.close import close, exact, near
from tests.deepspeed.parallel import shared_folder
from tests.factors.test_fit import Sequences, fit, sequences
from tests.factors.worker import batches, config, model
from tests.ranks import free_port, of_ranks, run_ranks
from tests.truth import Truth

COUNT = 5
"""Of batches: the second rank has one less."""
MODES = {
    "whole": None,
    **{f"stage {stage}": config(stage, optimizer=True) for stage in (0, 2, 3)},
    "stage 0, no optimizer": config(0, optimizer=False),
    "stage 3, no optimizer": config(3, optimizer=False),
    "stage 3, offloaded": config(3, optimizer=False, offload=True),
    "stage 3, bf16": config(3, optimizer=False, dtype="bf16"),
}


def made(mode: str):
    """The model, or an engine of it."""
    if MODES[mode] is None:
        return model()
    return ds_kfac.engine.entry._plain_initialize(model=model(), config=MODES[mode])[0]


def own_batches() -> list:
    return batches(COUNT)[dist.get_rank() :: dist.get_world_size()]


@cache
def fitted(mode: str) -> Factors:
    """Asserts that the model is left as it was, and that an engine goes on training."""
    own = made(mode)
    plain = getattr(own, "module", own)
    before = [p.detach().clone() for p in plain.parameters()]
    found = fit(own, own_batches(), out=shared_folder())
    exact([p.detach() for p in plain.parameters()], before)
    assert plain.training and all(p.grad is None for p in plain.parameters())
    if MODES[mode] is not None:
        if "optimizer" in MODES[mode]:
            for batch in batches(2):
                own.backward(own(*batch))
                own.step()
            assert own(*batch).isfinite()
        own.destroy()
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_every_stage_gives_the_factors_of_the_whole_model(mode):
    whole, found = fitted("whole"), fitted(mode)
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


@pytest.mark.ranks(2)
def test_two_ranks_have_the_factors_of_all_rows():
    found, own = fitted("whole"), model().double()
    truth = Truth(own)
    for x, y in batches(COUNT):
        with truth:
            (own(x, y) / COUNT).backward()
    for name, (A, G, rows) in truth.factors().items():
        assert found.count(name, "A") == rows
        # sums of ranks and batches in another order, and all that comes before them in fp32
        terms = {"sums": 500, "condition": 4, "dtype": torch.float32}
        close((found.factor(name, "A"), found.factor(name, "G")), (A, G), **terms)


SPOILT = {
    "nan": "rank 1, batch 1: the loss is nan",
    "apart": "rank 1, batch 1: the loss depends on no layer",
    "number": "rank 1, batch 1: ValueError: the batch contains no tensor with",
    "raises": "rank 1, batch 1: RuntimeError: no memory",
}


def spoilt(how: str):
    """A loss that is no number in the second batch of rank 1, none of the layers', or raises."""
    calls = iter(range(COUNT))

    def loss(own, batch):
        is_bad, value = dist.get_rank() == 1 and next(calls) == 1, own(*batch)
        if is_bad and how == "raises":
            raise RuntimeError("no memory")
        if is_bad and how != "number":
            return value * float("nan") if how == "nan" else value.detach()
        return value

    return loss


BOTH = ("whole", "stage 3, no optimizer")
SPOILT_MODES = [(how, mode) for how in SPOILT for mode in BOTH]
SPOILT_MODES.remove(("raises", BOTH[1]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("how", "mode"), SPOILT_MODES)
def test_a_problem_of_one_rank_stops_all(how, mode):
    """At stage 3 others must not wait for its weights; an error in the loss ends its rank there."""
    data = own_batches()
    if how == "number" and dist.get_rank() == 1:
        data[1] = 1
    with pytest.raises(FactorsError) as problem:
        fit(made(mode), data, spoilt(how), out=shared_folder())
    texts = of_ranks(str(problem.value))
    assert SPOILT[how] in texts[0] and texts[0] == texts[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", BOTH)
def test_a_rank_without_batches_helps_the_others(mode):
    """At stage 3 they fetch its weights."""
    data = batches(COUNT) if dist.get_rank() == 0 else []
    found, spread = fit(made(mode), data, out=shared_folder()), fitted("whole")
    assert found.header["sequences"] == 3 * COUNT
    for name in found:
        close(found.factor(name, "G"), spread.factor(name, "G"), sums=24 * COUNT)


@pytest.mark.ranks(2)
def test_ranks_with_other_layers_are_told():
    own = nn.Sequential(nn.Linear(4, 4 + dist.get_rank()))
    with pytest.raises(FactorsError, match="ranks have different layers"):
        fit(own, [torch.ones(2, 4)], lambda own, x: own(x).sum(), out=shared_folder())


def joins(payload: dict) -> float:
    # as in a script of a launcher, which has not joined its job
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = payload["port"]  # the last job's store may still be there
    return fit(Sequences(), sequences(2), out=payload["out"]).header["sequences"]


@pytest.mark.distributed
def test_a_launched_script_that_has_not_joined_its_job_does(tmp_path):
    payload = {"out": str(tmp_path), "port": str(free_port())}
    said = run_ranks("tests.factors.test_ranks:joins", world=2, payload=payload, timeout=60)
    assert said == [12, 12]
