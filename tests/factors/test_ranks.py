"""Factors on two ranks, of models at every ZeRO stage: those of one process over all data, whatever
the engine."""

import pytest

from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit
from tests.close import close, exact, near
from tests.factors.worker import batches, config, model
from tests.ranks import run_ranks

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
            if "bf16" in mode:
                expected = whole.factor(name, side)
                bound = 0.05 * expected.abs().max()
                near(
                    found.factor(name, side),
                    expected,
                    bound,
                    "weights, rows and gradients have 8 bits",
                )
            else:
                exact(found.factor(name, side), whole.factor(name, side))
        if "bf16" not in mode:
            exact(found.corrected(name), whole.corrected(name))
    for rank in said:
        assert rank[mode]["grads"] == rank[mode]["moved"] == 0
        assert rank[mode]["training"]


def test_engines_train_on_as_if_nothing_had_been(made):
    _, said = made
    untouched = run_ranks(
        "tests.factors.worker:main",
        world=2,
        payload={"modes": MODES, "out": None, "batches": COUNT},
    )
    for mode in (mode for mode in MODES if "loss" in said[0][mode]):
        assert [rank[mode]["loss"] for rank in said] == [
            rank[mode]["loss"] for rank in untouched
        ], mode


def test_two_ranks_give_what_one_process_gives(made, tmp_path):
    out, _ = made
    whole = Factors.load(out / "whole")
    alone = fit(model(), batches(COUNT), out=tmp_path, progress=False)
    for name in alone:
        for side in "AG":
            # of COUNT * 24 rows, sums of ranks and batches in another order
            close(whole.factor(name, side), alone.factor(name, side), sums=24 * COUNT)
            assert whole.count(name, side) == alone.count(name, side)


def test_a_rank_that_dies_leaves_nothing_that_loads(tmp_path):
    payload = {"modes": {"whole": None}, "out": str(tmp_path), "batches": COUNT, "dies_at": 1}
    with pytest.raises(AssertionError, match="did not finish"):
        run_ranks("tests.factors.worker:main", world=2, payload=payload)
    with pytest.raises(FactorsError, match="not finished"):
        Factors.load(tmp_path / "whole")


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
    modes = {
        mode: MODES[mode]
        for mode in ("whole", "stage 3, no optimizer")[: 1 if how == "raises" else 2]
    }
    said = run_ranks(
        "tests.factors.worker:main",
        world=2,
        payload={"modes": modes, "out": str(tmp_path), "batches": COUNT, "spoils": how},
    )
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
