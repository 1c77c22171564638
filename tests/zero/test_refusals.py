"""Combinations that are refused, without the engines that could be built of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ds_kfac.config.keys import parse
from ds_kfac.engine.refusals import REFUSALS, of_config, refused

PLAIN = of_config({"optimizer": {"type": "AdamW"}}, parse({}), own=None)


def pipeline(**facts):
    """The context of an engine with stages that has only these attributes."""
    return replace(PLAIN, engine=SimpleNamespace(**facts), pipeline=True)


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
            of_config(
                {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
                parse({}),
                own=None,
            ),
            'offload_param.device to "cpu"',
        ),
        (
            "pipeline of another kind",
            pipeline(),
            "default schedule",
        ),
        (
            "pipeline with a model axis",
            pipeline(is_model_parallel=True),
            "pipe and data only",
        ),
        (
            "mixture of experts in BF16_Optimizer",
            replace(PLAIN, experts=True, bf16_optimizer=True),
            "grad_accum_dtype",
        ),
        *(
            (
                "mixture of experts with other model parallelism",
                replace(PLAIN, experts=True, **{other: True}),
                "data parallelism only",
            )
            for other in ("sharded", "pipeline", "sequence")
        ),
        (
            "kfac.rescale_weights with tensor parallelism",
            replace(PLAIN, sharded=True, config=parse({"rescale_weights": True})),
            "set it to false",
        ),
        (
            "compressed-communication optimizer",
            of_config({"optimizer": {"type": "OneBitAdam"}}, parse({}), own=None),
            "such as AdamW",
        ),
        (
            "Muon",
            of_config({"optimizer": {"type": "Muon"}}, parse({}), own=None),
            "choose Muon or K-FAC",
        ),
    ],
)
def test_a_combination_is_refused_with_a_remedy(name, context, remedy):
    applies, text = REFUSALS[name]
    assert applies(context) and not applies(PLAIN)
    assert remedy in text
