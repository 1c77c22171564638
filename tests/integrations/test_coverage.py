"""The architectures of benchmarks/results/coverage are covered, and some of its rows are counted
again."""

import json

import pytest

from tests.integrations.tiny_models import STAGES, Architecture, shares
from tests.ranks import ROOT, run_alone

STEPPED, CURVED = 0.95, 0.9
"""Least shares of a language model's matrix parameters: preconditioned, and preconditioned with
curvature."""

AGAIN = ("llama", "mixtral", "dbrx", "xlnet", "zamba", "clip", "bit", "moonshine_streaming")
AGAIN += ("luke", "yolos")
"""Plain layers, stacks, experts in one matrix, einsum, layers of one weight, two towers,
standardized weights, convolutions that pad, a bias that is only held, a table that is broadcast."""


@pytest.fixture
def rows():
    return json.loads((ROOT / "benchmarks/results/coverage/models.json").read_text())["models"]


def test_language_models_are_stepped_whole_and_with_curvature(rows):
    missed = {
        name: share
        for name, row in rows.items()
        if row["task"] == "causal" and "error" not in (share := row["shares"])
        if share["stepped"] < STEPPED * share["matrices"]
        or share["curved"] < CURVED * share["matrices"]
    }
    assert not missed


def test_nothing_crashes_and_no_layer_is_silent(rows):
    """Where there is a tiny model, and a batch that it takes."""
    assert len(rows) >= 300
    runs = {
        (name, stage): row["train"][str(stage)] for name, row in rows.items() for stage in STAGES
    }
    taken = {key: run for key, run in runs.items() if run.get("where") not in ("build", "forward")}
    assert not {key: run["error"] for key, run in taken.items() if "error" in run}
    assert not {key: run["silent"] for key, run in taken.items() if run["silent"]}
    assert len(taken) >= 70 * len(STAGES)


@pytest.mark.parametrize("name", AGAIN)
def test_a_row_is_what_is_counted_now(rows, name):
    pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
    row = rows[name]
    assert shares(Architecture(name, row["head"])) == row["shares"]


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_tiny_model_trains_as_its_row_says(rows, name):
    pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
    row = rows[name]
    architecture = Architecture(name, row["head"])
    target = "tests.integrations.tiny_models:trained"
    for stage, run in run_alone(target, device="cpu", payload=architecture, timeout=300).items():
        for key in ("layers", "moved", "silent"):
            assert run[key] == row["train"][stage][key], key
        assert run["after"] < 0.5 * run["before"]
