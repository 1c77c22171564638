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


def of(**facts):
    return replace(PLAIN, **facts)


def pipeline(**facts):
    """Of an engine with stages that has only these attributes."""
    return of(engine=SimpleNamespace(**facts), pipeline=True)


def autoep(tensor: int = 1, backend: str = "comm", **experts):
    """Of an engine with a mixture by AutoEP."""
    mixture = nn.Module()
    mixture._is_autoep_layer, mixture.comm_backend = True, backend
    plain = {"use_triton_grouped_mm": False, "gate_up_impl": "separate"}
    mixture.experts = SimpleNamespace(**{**plain, **experts})
    return of(engine=SimpleNamespace(module=mixture, autotp_size=lambda: tensor), experts=True)


CASES = [
    ("tensor and sequence parallelism", of(sharded=True, sequence=True), "a group of one rank"),
    ("NVMe offload of parameters", config(zero_optimization=NVME), 'offload_param.device to "cpu"'),
    (f"{PIPELINE} of another kind", pipeline(), "default schedule"),
    (f"{PIPELINE} with a model axis", pipeline(is_model_parallel=True), "axes pipe and data"),
    (f"{EXPERTS} in BF16_Optimizer", of(experts=True, bf16_optimizer=True), "grad_accum_dtype"),
    *(
        (
            f"{EXPERTS} with other model parallelism",
            of(experts=True, **other),
            "data parallelism only",
        )
        for other in ({"sharded": True}, {"pipeline": True}, {"sequence": True})
    ),
    ("AutoEP with AutoTP", autoep(tensor=2), "autotp_size to 1"),
    ("AutoEP with DeepEP", autoep(backend="deepep"), 'comm_backend to "comm"'),
    ("AutoEP with Triton's grouped products", autoep(use_triton_grouped_mm=True), "to true"),
    ("AutoEP with one product for gate and up", autoep(gate_up_impl="fused"), 'to "separate"'),
    (
        "kfac.rescale_weights with tensor parallelism",
        of(sharded=True, config=RESCALING),
        "to false",
    ),
    ("compressed-communication optimizer", config("OneBitAdam"), "such as AdamW"),
    ("Muon", config("Muon"), "choose Muon or K-FAC"),
]


@pytest.mark.parametrize(("name", "context", "remedy"), CASES)
def test_a_combination_is_refused_with_a_remedy(name, context, remedy):
    applies, text = REFUSALS[name]
    assert applies(context) and not applies(PLAIN) and refused(PLAIN) == []
    assert not name.startswith("AutoEP") or not applies(autoep())
    assert remedy in text


@pytest.mark.parametrize("optimizer", ["AdamW", "KFACAdamW"])
def test_what_the_config_shows_is_refused_before_deepspeed_builds_anything(optimizer, monkeypatch):
    """DeepSpeed would compile for minutes first."""
    unreachable = Mock(side_effect=AssertionError, __signature__=signature(entry._plain_initialize))
    monkeypatch.setattr(entry, "_plain_initialize", unreachable)
    monkeypatch.setattr(entry, "start_alone", lambda: None)
    model, made = nn.Linear(2, 2), {"type": optimizer, "params": {"lr": 1e-3}}
    settings = {"optimizer": made, "zero_optimization": NVME, "kfac": {}}
    with pytest.raises(ValueError, match="NVMe offload of parameters"):
        ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=settings)
