"""Some rows of benchmarks/results/coverage, which no program makes any more, are counted again."""

import json

import pytest

from tests.integrations.tiny_models import Architecture, shares
from tests.ranks import ROOT, run_alone

AGAIN = ("llama", "mixtral", "dbrx", "xlnet", "zamba", "clip", "bit", "moonshine_streaming")
AGAIN += ("luke", "yolos")
"""Plain layers, stacks, experts in one matrix, einsum, layers of one weight, two towers,
standardized weights, convolutions that pad, a bias that is only held, a table that is broadcast."""


pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
ROWS = json.loads((ROOT / "benchmarks/results/coverage/models.json").read_text())["models"]


@pytest.mark.parametrize("name", AGAIN)
def test_a_row_is_what_is_counted_now(name):
    row = ROWS[name]
    assert shares(Architecture(name, row["head"])) == row["shares"]


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_tiny_model_trains_as_its_row_says(name):
    row = ROWS[name]
    target = "tests.integrations.tiny_models:trained"
    run = run_alone(target, device="cpu", payload=Architecture(name, row["head"]), timeout=300)
    expected = row["train"]["2"]
    assert {key: run[key] for key in ("layers", "moved", "silent")} == {
        key: expected[key] for key in ("layers", "moved", "silent")
    }
    assert run["losses"][-1] < 0.5 * run["losses"][0]
