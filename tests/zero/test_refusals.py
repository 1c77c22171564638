"""Combinations that are refused, without the engines that could be built of them."""

from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch import nn

import ds_kfac
from ds_kfac.config.keys import parse
from ds_kfac.engine import entry
from ds_kfac.engine.refusals import REFUSALS, of_config, refused


def config(optimizer: str = "AdamW", **more):
    return of_config({"optimizer": {"type": optimizer}, **more}, parse({}), own=None)


PLAIN = config()
NVME = {"stage": 3, "offload_param": {"device": "nvme"}}
RESCALING = parse({"rescale_weights": True})
EXPERTS, PIPELINE = "mixture of experts", "pipeline"


def pipeline(**facts):
    """The context of an engine with stages that has only these attributes."""
    return replace(PLAIN, engine=SimpleNamespace(**facts), pipeline=True)


def experts(**facts):
    return replace(PLAIN, experts=True, **facts)


def test_a_plain_config_is_not_refused():
    assert refused(PLAIN) == []


@pytest.mark.parametrize(
    ("name", "context", "remedy"),
    [
        (
            "tensor and sequence parallelism",
            replace(PLAIN, sharded=True, sequence=True),
            "a group of one rank",
        ),
        (
            "NVMe offload of parameters",
            config(zero_optimization=NVME),
            'offload_param.device to "cpu"',
        ),
        (f"{PIPELINE} of another kind", pipeline(), "default schedule"),
        (f"{PIPELINE} with a model axis", pipeline(is_model_parallel=True), "pipe and data only"),
        (f"{EXPERTS} in BF16_Optimizer", experts(bf16_optimizer=True), "grad_accum_dtype"),
        *(
            (
                f"{EXPERTS} with other model parallelism",
                experts(**{other: True}),
                "data parallelism only",
            )
            for other in ("sharded", "pipeline", "sequence")
        ),
        (
            "kfac.rescale_weights with tensor parallelism",
            replace(PLAIN, sharded=True, config=RESCALING),
            "set it to false",
        ),
        ("compressed-communication optimizer", config("OneBitAdam"), "such as AdamW"),
        ("Muon", config("Muon"), "choose Muon or K-FAC"),
    ],
)
def test_a_combination_is_refused_with_a_remedy(name, context, remedy):
    applies, text = REFUSALS[name]
    assert applies(context) and not applies(PLAIN)
    assert remedy in text


@pytest.mark.parametrize("optimizer", ["AdamW", "KFACAdamW"])
def test_what_the_config_shows_is_refused_before_deepspeed_builds_anything(optimizer, monkeypatch):
    """DeepSpeed would compile for minutes first."""
    unreachable = Mock(side_effect=AssertionError, __signature__=signature(entry._plain_initialize))
    monkeypatch.setattr(entry, "_plain_initialize", unreachable)
    monkeypatch.setattr(entry, "start_alone", lambda: None)
    model = nn.Linear(2, 2)
    settings = {
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": NVME,
        "kfac": {},
    }
    with pytest.raises(ValueError, match="NVMe offload of parameters"):
        ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=settings)
