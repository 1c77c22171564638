"""``check`` and attach are of one mind: of what is refused, of nulls, and of the plan."""

import argparse
import contextlib
import copy
import io
import json
from pathlib import Path

import pytest
from torch import nn

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
SGD = {"type": "SGD", "params": {"lr": 1.0}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OURS = {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}

REFUSED = {
    "prediction": (
        {"optimizer": SGD, "kfac": {"factor": {"fisher": "monte_carlo", "prediction": "tail"}}},
        "no module 'tail'",
    ),
    "offload": (
        {
            "optimizer": OURS,
            "zero_optimization": OFFLOAD,
        },
        "cannot be offloaded in part",
    ),
    "betas": (
        {"optimizer": {"type": "KFACAdamW", "params": {"betas": [0.9, 1.5]}}},
        "optimizer.params.betas",
    ),
    "no optimizer": ({"kfac": {}}, "no optimizer"),
}
FITS = {
    "AdamW": {"optimizer": ADAMW, "kfac": {}},
    "SGD": {
        "optimizer": SGD,
        "kfac": {},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
    "KFACAdamW": {"optimizer": OURS},
    "KFACAdamW, bf16": {
        "optimizer": OURS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)


def worker(folder: str) -> dict:
    import ds_kfac
    from ds_kfac.estimate import command
    from ds_kfac.estimate.subject import Subject

    found = {}
    for name, config in {**{name: config for name, (config, _) in REFUSED.items()}, **FITS}.items():
        config = copy.deepcopy({"train_micro_batch_size_per_gpu": 2, **config})
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(config))
        arguments = {
            "config": str(path),
            "model": f"{__name__}:Net",
            "lora": None,
            "world": 1,
            "optimizer": None,
            "dtype": None,
        }
        try:
            said = command.check(argparse.Namespace(**arguments))
        except ValueError as error:
            said = f"refused: {error}"
        try:
            model = Net()
            engine = ds_kfac.initialize(
                model=model, model_parameters=model.parameters(), config=copy.deepcopy(config)
            )[0]
            # the one that is there; an engine without an optimizer has none
            kfac = ds_kfac.attach(engine)
        except ValueError as error:
            found[name] = said, f"refused: {error}"
            continue
        subject, rule = Subject(Net(), config), kfac.preconditioner.rule
        same = {
            "config": kfac.preconditioner.config == subject.config,
            "moments": subject.rule.moments_count(subject.config)
            == rule.moments_count(kfac.preconditioner.config),
            "optimizer": subject.rule is rule,
        }
        found[name] = said, same, kfac.report.splitlines()
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = str(tmp_path_factory.mktemp("check"))
    return run_ranks("tests.deepspeed.test_check:worker", world=1, payload=folder)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_attach_refuses_check_refuses_in_the_same_words(found, name):
    said, attached = found[name][:2]
    assert isinstance(attached, str) and REFUSED[name][1] in attached, attached
    assert said.startswith("refused: ") and REFUSED[name][1] in said, said


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_planned_and_summed_up_as_attach_does(found, name):
    said, same, report = found[name]
    assert all(same.values()), same
    lines = said.splitlines()
    assert lines[1:5] == report[:4] and lines[5] == report[4], (lines[1:6], report[:5])


class Words(nn.Module):
    """Of the kind that recipes are for."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = (
            nn.Embedding(50, 12),
            nn.Linear(12, 12),
            nn.Linear(12, 50),
        )


def warmup(kind: str = "WarmupLR", **params) -> dict:
    return {"scheduler": {"type": kind, "params": {"warmup_num_steps": 10, **params}}}


def kfac_adamw(**params) -> dict:
    return {"optimizer": {"type": "KFACAdamW", "params": {"torch_adam": True, **params}}}


RATES = {
    "high, WarmupLR": (kfac_adamw(lr=0.2, weight_decay=0.01) | warmup(warmup_max_lr=0.2), True),
    "high, WarmupDecayLR": (
        kfac_adamw(lr=0.2, weight_decay=0.01)
        | warmup("WarmupDecayLR", total_num_steps=100, warmup_max_lr=0.2),
        True,
    ),
    "high, WarmupCosineLR": (
        kfac_adamw(lr=0.2) | warmup("WarmupCosineLR", total_num_steps=100),
        True,
    ),
    "high, a step of torch": (
        kfac_adamw(lr=0.2) | {"scheduler": {"type": "StepLR", "params": {"step_size": 9}}},
        True,
    ),
    "the schedule's counts": (
        kfac_adamw(lr=0.2, weight_decay=0.01) | warmup(warmup_max_lr=2e-3),
        False,
    ),
    "the schedule's is high": (
        kfac_adamw(lr=2e-3, weight_decay=0.01) | warmup(warmup_max_lr=0.2),
        True,
    ),
    "high, no schedule": (kfac_adamw(lr=0.2), True),
    "defaults": (kfac_adamw(), False),
}


def rates_worker(folder: str) -> dict:
    import ds_kfac
    from ds_kfac.__main__ import main

    found = {}
    for name, (config, _) in RATES.items():
        config = {"train_micro_batch_size_per_gpu": 2, **copy.deepcopy(config)}
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(config))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(["check", "--config", str(path), "--model", f"{__name__}:Words"])
        model = Words()
        engine = ds_kfac.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        texts = printed.getvalue().splitlines(), engine.kfac.report.splitlines()
        found[name] = [
            [line for line in lines if "far from every recipe" in line] for lines in texts
        ]
        engine.destroy()
    return found


def test_check_says_of_rates_what_attach_says(tmp_path):
    found = run_ranks("tests.deepspeed.test_check:rates_worker", world=1, payload=str(tmp_path))[0]
    for name, (checked, attached) in found.items():
        assert checked == attached and bool(attached) == RATES[name][1], (name, checked, attached)
