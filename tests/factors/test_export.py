"""The running factors of a training run, and grams beside its checkpoints."""

from dataclasses import replace

import pytest
import torch

import ds_kfac
from ds_kfac.comm.message import merged
from ds_kfac.factors.files import Factors, FactorsError
from examples.gpt import GPT
from tests.close import exact
from tests.deepspeed.parallel import shared_folder
from tests.factors.worker import MODEL, batches, config, model

pytestmark = pytest.mark.ranks(2)


def train(engine, count: int) -> None:
    for batch in batches(count):
        engine.backward(engine(*batch))
        engine.step()


def factors_of(engine) -> dict[str, torch.Tensor]:
    """The factors of all ranks. Collective."""
    kept = engine.kfac.preconditioner.curvature.factors
    return merged({key: own.side.blocks(own.packed_P)[0][0] for key, own in kept.items()}, None)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_was_exported_is_what_the_ranks_have(stage):
    kfac = {
        "factor": {"update_interval": 1},
        "eigenbasis": {"refresh_interval": 2},
        "checkpoint": {"grams": True},
    }
    made, out = {**config(stage, optimizer=True), "kfac": kfac}, shared_folder()
    engine = ds_kfac.initialize(model=model(), config=made)[0]
    with pytest.raises(FactorsError, match="no factor has been computed yet; train a step first"):
        engine.kfac.export(out)
    train(engine, 3)
    engine.kfac.export(out)
    engine.save_checkpoint(out, tag="there")
    factors, values = factors_of(engine), {}
    for name, own in engine.kfac.preconditioner.state.items():
        values |= {f"{name}/{side}": getattr(own, side).values for side in "AG"}
    values = merged(values, None)
    found, grams = Factors.load(out), Factors.load(f"{out}/there/grams")
    assert found.header["steps"] == grams.header["steps"] == 3
    assert len(factors) == 20  # of 11 layers, of which two pairs share their inputs
    for name in found:
        for side in "AG":
            # layers that share an input have the factor of the first
            key = found.layers[name][side]["of"]
            exact(found.factor(name, side), factors[key])
            exact(found.eigenbasis(name, side).values, values[f"{name}/{side}"])
            assert found.count(name, side) == 3
        exact(grams.factor(name, "A"), found.factor(name, "A").bfloat16().float())
        with pytest.raises(FactorsError, match=f"has no {name}/G"):
            grams.factor(name, "G")


@pytest.mark.parametrize("stage", [0, 3])
def test_training_begins_from_fitted_factors(stage):
    made = {
        **config(stage, optimizer=True),
        "optimizer": {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "kfac": {"report": "none"},
    }
    out, own = shared_folder(), {"factor": {"fisher": "activations_only"}}
    engine = ds_kfac.initialize(model=model(), config=made)[0]
    ds_kfac.fit(engine, batches(3), out=out, config=own, corrected=False, progress=False)
    engine.kfac.begin_from(out)
    fitted, factors = Factors.load(out), factors_of(engine)
    assert factors and all(key.endswith("/A") for key in factors)
    for key, factor in factors.items():
        exact(fitted.factor(key[:-2], "A"), factor)
    states = engine.kfac.preconditioner.state.values()
    assert all(state.A.vectors for state in states if state.A)
    train(engine, 2)
    counters = engine.kfac.counters()
    assert (counters["steps"], counters["not_finite_layers"]) == (2, 0)
    other = ds_kfac.initialize(model=GPT(replace(MODEL, width=32)), config=made)[0]
    with pytest.raises(FactorsError, match="this model and config need"):
        other.kfac.begin_from(out)
    kept = other.kfac.preconditioner.curvature.factors.values()
    assert all(float(factor.updates) == 0 for factor in kept)
