"""The running factors of a training run, and grams beside its checkpoints."""

from dataclasses import replace

import pytest
import torch

import ds_kfac
from ds_kfac.factors.files import Factors, FactorsError
from examples.gpt import GPT
from tests.close import exact
from tests.factors.worker import MODEL, batches, config, model
from tests.ranks import init_deepspeed, run_ranks

pytestmark = pytest.mark.distributed


def dense(factors: dict) -> dict[str, torch.Tensor]:
    return {key: own.side.blocks(own.packed_P)[0][0].clone() for key, own in factors.items()}


def train(payload: dict) -> dict:
    """Some steps of an engine, its export and checkpoint; what its factors are."""
    init_deepspeed()
    torch.manual_seed(0)
    kfac = {
        "factor": {"update_interval": 1},
        "eigenbasis": {"refresh_interval": 2},
        "checkpoint": {"grams": True},
    }
    made = {**config(payload["stage"], optimizer=True), "kfac": kfac}
    engine = ds_kfac.initialize(model=GPT(MODEL), config=made)[0]
    out = payload["out"]
    with pytest.raises(FactorsError, match="no factor has been computed yet; train a step first"):
        engine.kfac.export(out)
    for batch in batches(3):
        engine.backward(engine(*batch))
        engine.step()
    engine.kfac.export(out)
    engine.save_checkpoint(out, tag="there")
    kept = engine.kfac.preconditioner.curvature.factors
    factors = dense(kept)
    states = engine.kfac.preconditioner.state
    bases = {
        f"{name}/{s}": getattr(own, s).values.clone() for name, own in states.items() for s in "AG"
    }
    engine.destroy()
    return {"factors": factors, "bases": bases}


@pytest.mark.parametrize("stage", [0, 3])
def test_what_was_exported_is_what_the_ranks_have(stage, tmp_path):
    said = run_ranks(
        "tests.factors.test_export:train", world=2, payload={"stage": stage, "out": str(tmp_path)}
    )
    found, grams = Factors.load(tmp_path), Factors.load(tmp_path / "there/grams")
    assert found.header["steps"] == grams.header["steps"] == 3
    factors = {key: own for rank in said for key, own in rank["factors"].items()}
    bases = {key: own for rank in said for key, own in rank["bases"].items()}
    assert len(factors) == 20  # of 11 layers, of which two pairs share their inputs
    for name in found:
        for side in "AG":
            # layers that share an input have the factor of the first
            key = found.layers[name][side]["of"]
            exact(found.factor(name, side), factors[key])
            exact(found.eigenbasis(name, side).values, bases[f"{name}/{side}"])
            assert found.count(name, side) == 3
        exact(grams.factor(name, "A"), found.factor(name, "A").bfloat16().float())
        with pytest.raises(FactorsError, match=f"has no {name}/G"):
            grams.factor(name, "G")


def begin(payload: dict) -> dict:
    """A KFACAdamW engine that has its factors from ``ds_kfac.fit``, and one that has not; then a
    step of each."""
    init_deepspeed()
    made = {
        **config(payload["stage"], optimizer=True),
        "optimizer": {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "kfac": {"report": "none"},
    }
    folder, found = payload["out"], {}
    for warm in (False, True):
        engine = ds_kfac.initialize(model=model(), config=made)[0]
        if warm:
            own = {"factor": {"fisher": "activations_only"}}
            ds_kfac.fit(engine, batches(3), out=folder, config=own, corrected=False, progress=False)
            engine.kfac.begin_from(folder)
            kept = engine.kfac.preconditioner.curvature.factors
            states = engine.kfac.preconditioner.state.values()
            found["factors"] = dense(kept)
            found["bases"] = all(state.A.vectors for state in states if state.A)
        for batch in batches(2):
            engine.backward(engine(*batch))
            engine.step()
        found[warm] = engine.kfac.counters()["steps"], engine.kfac.counters()["not_finite_layers"]
        engine.destroy()
    engine = ds_kfac.initialize(model=GPT(replace(MODEL, width=32)), config=made)[0]
    with pytest.raises(FactorsError, match="of this model and config"):
        engine.kfac.begin_from(folder)
    found["after"] = all(
        float(own.updates) == 0 for own in engine.kfac.preconditioner.curvature.factors.values()
    )
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_training_begins_from_fitted_factors(stage, tmp_path):
    said = run_ranks(
        "tests.factors.test_export:begin", world=2, payload={"stage": stage, "out": str(tmp_path)}
    )
    fitted, held = Factors.load(tmp_path), {}
    for rank in said:
        assert rank["bases"] and rank["after"] and rank[True] == rank[False] == (2, 0), rank
        held |= rank["factors"]
    assert held and all(key.endswith("/A") for key in held)
    for key, factor in held.items():
        exact(fitted.factor(key[:-2], "A"), factor)
