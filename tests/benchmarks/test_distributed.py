"""The benchmark of several ranks: both phases on a tiny model and two ranks, and its counts."""

import json

import pytest
from torch import nn

from benchmarks.distributed import __main__ as distributed
from benchmarks.distributed.cases import TINY, gelu_gpt
from benchmarks.distributed.report import STEPS, WAYS
from benchmarks.distributed.times import REFRESH
from ds_kfac.comm.message import ALIGNMENT
from tests.close import near

WORLD = 2
FACTORS = 2 * sum(isinstance(module, nn.Linear) for module in gelu_gpt(TINY).modules())


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The results of the whole command."""
    folder = tmp_path_factory.mktemp("results") / "distributed"
    argv = f"--tiny --worlds {WORLD} --world {WORLD} --strategies MEM-OPT --rows 1 --intervals 2"
    assert distributed.main([*argv.split(), "--out", str(folder)]) == 0
    return folder


def rows_of(out, phase):
    return json.loads((out / f"{phase}.json").read_text())["rows"]


@pytest.mark.distributed
def test_counters_are_torch_distributeds_and_no_step_has_more_than_four_collectives(out):
    rows = rows_of(out, "bytes")
    strategies = {"MEM-OPT", "COMM-OPT", "ZeRO-1", "ZeRO-2", "ZeRO-3"}
    assert {case["strategy"] for case in rows} == strategies
    for case in rows:
        name = (case["strategy"], case["wire"], case["optimizer"])
        for rank in case["ranks"]:
            for step in STEPS:
                wrapped, ours = dict(rank[step]["wrapped_calls"]), dict(rank[step]["calls"])
                assert wrapped.pop("all_reduce", 0) == ours.pop("proof", 0) <= 2, (name, step)
                assert wrapped.keys() <= {"all_to_all_single"}, (name, step)
                assert sum(wrapped.values()) == sum(ours.values()) <= 4, (name, step)
                padding = ALIGNMENT * sum(ours.values()) * WORLD
                for place, way in enumerate(WAYS):
                    counted = {k: n for k, n in rank[step][way].items() if k != "proof"}
                    moved = rank[step]["wire"][place]
                    assert 0 <= moved - sum(counted.values()) <= padding, (name, step, way)
            if case["optimizer"] == "AdamW":
                assert rank["state"] + rank["adam"] == rank["planned_state"], name


@pytest.mark.distributed
def test_every_mode_of_the_times_does_the_same_work_and_the_page_has_both_parts(out):
    rows = {row["mode"]: row for row in rows_of(out, "times")}
    text = (out.parent / "distributed.md").read_text()
    assert "## Bytes, collectives and memory\n" in text and "## Steps without spikes\n" in text
    for name in ("bytes.csv", "times.csv", "payload.png", "steps.png"):
        assert (out / name).stat().st_size > 0, name
    assert list(rows) == ["no K-FAC", "all at once", "staggered"]
    at_once = rows["all at once"]["payload"]
    for mode in ("all at once", "staggered"):
        assert rows[mode]["refreshes"] == FACTORS, mode
        assert len(rows[mode]["wall"]) == REFRESH and min(rows[mode]["wall"]) > 0, mode
        near(rows[mode]["payload"], at_once, 0.02 * at_once, "numbers travel with it", what=mode)
