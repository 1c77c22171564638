"""docs/reference/models.md says what benchmarks/results/coverage has, that meets its goals, and
some rows are counted again."""

import json

import pytest

from benchmarks.coverage.__main__ import train_phase
from benchmarks.coverage.architectures import TIMM, Architecture
from benchmarks.coverage.measure import STAGES, shares
from benchmarks.coverage.report import CURVED, STEPPED, all_rows, report
from tests.ranks import ROOT

AGAIN = (
    "llama",
    "mixtral",
    "dbrx",
    "xlnet",
    "zamba",
    "clip",
    "bit",
    "moonshine_streaming",
    "luke",
    "yolos",
)
"""Plain layers, stacks, experts in one matrix, einsum, layers of one weight, two towers,
standardized weights, convolutions that pad, a bias that is only held, a table that is broadcast."""


@pytest.fixture(scope="module")
def found():
    return json.loads((ROOT / "benchmarks/results/coverage/models.json").read_text())


@pytest.fixture
def rows(found):
    return found["models"]


def test_the_pages_are_those_of_the_results(found):
    assert (ROOT / "docs/reference/models.md").read_text() == report(found)
    assert (ROOT / "benchmarks/results/coverage/models.md").read_text() == all_rows(found)


def test_every_kind_of_model_is_there(rows):
    assert len(rows) >= 300 and {f"timm/{name}" for name in TIMM} <= set(rows)
    assert all(set(row) == {"task", "head", "shares", "train"} for row in rows.values())


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
    assert shares(Architecture(name, row["task"], row["head"])) == row["shares"]


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_tiny_model_trains_as_its_row_says(rows, name):
    pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
    row = rows[name]
    now = train_phase(Architecture(name, row["task"], row["head"]), 300)
    for stage, run in now.items():
        assert "error" not in run, run
        assert {key: run[key] for key in ("layers", "moved", "silent")} == {
            key: row["train"][stage][key] for key in ("layers", "moved", "silent")
        }
        assert run["after"] < 0.5 * run["before"]
