"""``ds_kfac.KFACAdamW``, the object, trains as the config's optimizer does, with a scheduler that was made before."""

import contextlib
import io

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import ds_kfac
from tests.deepspeed.modes import BY_NAME, LR
from tests.deepspeed.runs import parameter_groups, train, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
OPTIONS = {"lr": LR, "adam_lr": LR / 4, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.1, "torch_adam": True}


def schedule(step: int) -> float:
    return (step + 1) / 4  # the first step's rate is not lr


def engine_of(stage: int, *, as_object: bool, initialize=ds_kfac.initialize):
    """An engine and the groups whose rates the scheduler sets."""
    config = {**BY_NAME[f"adam-z{stage}"].config(1, torch.distributed.get_world_size())}
    model = make_net()
    groups = parameter_groups(model, "decay")
    if as_object:
        config.pop("optimizer")
        optimizer = ds_kfac.KFACAdamW(groups, **OPTIONS)
        given = {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, schedule)}
    else:
        config["optimizer"] = {"type": "KFACAdamW", "params": {**OPTIONS, "betas": [0.8, 0.9]}}
        given = {"model_parameters": groups, "lr_scheduler": lambda made: LambdaLR(made, schedule)}
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = initialize(model=model, config=config, **given)
    return engine, given.get("optimizer", engine.basic_optimizer).param_groups


def worker(folder: str) -> dict:
    import deepspeed

    found = {}
    for stage in range(4):
        engine, _ = engine_of(stage, as_object=False)
        train(engine, 1, steps=4)
        expected, rates = weights(engine), engine.get_lr()
        engine.destroy()
        engine, groups = engine_of(stage, as_object=True, initialize=deepspeed.initialize)
        train(engine, 1, steps=2)
        engine.save_checkpoint(f"{folder}/{stage}", tag="tag")
        train(engine, 1, steps=2, first=2)
        straight = weights(engine), engine.get_lr(), [group["lr"] for group in groups]
        engine.destroy()
        engine, groups = engine_of(stage, as_object=True)
        engine.load_checkpoint(f"{folder}/{stage}", tag="tag")
        loaded = [group["lr"] for group in groups]
        train(engine, 1, steps=2, first=2)
        found[stage] = {
            "same": all(torch.equal(straight[0][name], w) for name, w in expected.items()),
            "resumes": all(torch.equal(straight[0][name], w) for name, w in weights(engine).items()),
            "rates": (set(rates), set(straight[1]), set(straight[2]), set(loaded), len(groups)),
        }
        engine.destroy()
    return found


def test_the_object_trains_as_the_config_does(tmp_path):
    for stage, found in run_ranks("tests.deepspeed.test_optimizer_object:worker", world=2, payload=str(tmp_path))[
        0
    ].items():
        assert found["same"] and found["resumes"], (stage, found)
        assert found["rates"] == ({schedule(4) * LR}, {schedule(4) * LR}, {schedule(4) * LR}, {schedule(2) * LR}, 2)


def test_it_is_for_deepspeed_only():
    layer = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="only a DeepSpeed engine can step it"):
        ds_kfac.KFACAdamW(layer.parameters(), 0.1).step()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": "1e-2"}, "KFACAdamW: lr: got '1e-2'; must be a number"),
        ({"lr": 0.1, "betas": 0.9}, "KFACAdamW: betas: got 0.9; must be two numbers"),
        ({"lr": 0, "adam_lr": 0.1}, "KFACAdamW: lr: got 0; must be above 0 with adam_lr"),
    ],
)
def test_wrong_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ds_kfac.KFACAdamW(torch.nn.Linear(3, 2).parameters(), **options)


def test_an_optimizer_made_of_its_groups_is_recognised():
    """Accelerate replaces it by DeepSpeed's CPU Adam where the optimizer is offloaded."""
    from ds_kfac.directions.table import rule_in

    optimizer = ds_kfac.KFACAdamW(torch.nn.Linear(3, 2).parameters(), 0.1)
    other = torch.optim.AdamW(optimizer.param_groups)
    assert rule_in({}, optimizer).name == rule_in({}, other).name == "KFACAdamW"
    assert rule_in({}, torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())).optimizer_type is None
