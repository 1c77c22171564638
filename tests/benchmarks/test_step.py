"""What a step costs: kinds of steps, their mean, bytes, and what a call leaves to the next."""

import csv

import pytest

from benchmarks import step
from tests.close import close
from tests.programs import python
from tests.ranks import ROOT, free_port, run_ranks


def command(out, *more: str) -> str:
    program = ["benchmarks/step.py", "--model", "tiny", "--periods", "1"]
    program += ["--start-seconds", "0", "--out", str(out), *more]
    port = {"MASTER_PORT": str(free_port())}
    return python(*program, folder=ROOT, path=str(ROOT), **port).stdout


def rows_of(out) -> dict[tuple[str, str], dict[str, str]]:
    with (out / "step.csv").open() as file:
        return {(row["method"], row["what"]): row for row in csv.DictReader(file)}


@pytest.mark.distributed
def test_each_kind_of_step_is_timed_and_traced_and_the_next_call_skips_what_is_there(tmp_path):
    said = command(tmp_path, "--methods", "AdamW", "KFACAdamW", "--trace")
    assert said.endswith("goes on: nothing\n")
    rows = rows_of(tmp_path)
    counts = {
        what: int(row["count"]) for (method, what), row in rows.items() if method == "KFACAdamW"
    }
    assert counts == {"preconditioning only": 45, "factor update": 4, "refresh": 1, step.MEAN: 50}
    assert float(rows["KFACAdamW", step.MEAN]["state_mb"]) > 0
    assert float(rows["KFACAdamW", step.MEAN]["of_adamw"]) > 0
    traces = {path.name for path in tmp_path.glob("trace_*.json.gz")}
    assert {"trace_kfacadamw_refresh.json.gz", "trace_adamw_step.json.gz"} <= traces
    before = (tmp_path / "step.csv").read_text()
    said = command(tmp_path, "--methods", "AdamW", "KFACAdamW", "Muon", "--seconds", "0")
    assert said.endswith("goes on: Muon\n") and (tmp_path / "step.csv").read_text() == before


def work(out: str) -> None:
    arguments = ["--model", "tiny", "--periods", "1", "--fp32", "--together", "--out", out]
    step.main([*arguments, "--methods", "AdamW", "K-FAC into AdamW"])


@pytest.mark.distributed
def test_two_ranks_say_what_they_send(tmp_path):
    run_ranks("tests.benchmarks.test_step:work", world=2, payload=str(tmp_path), timeout=900)
    rows = rows_of(tmp_path)
    plain = rows["K-FAC into AdamW", "preconditioning only"]
    update = rows["K-FAC into AdamW", "factor update"]
    assert plain["ranks"] == "2" and 0 < float(plain["sent_mb"]) < float(update["sent_mb"])
    assert float(rows["AdamW", "step"]["sent_mb"]) == 0


def test_the_mean_is_of_all_steps_and_beside_adamws():
    measured = step.Measured(["refresh", "step", "step"], [3.0, 1.0, 1.4], [5, 0, 1])
    rows = {row["what"]: row for row in measured.rows(1.5)}
    close(rows[step.MEAN]["median_ms"], 1800.0, sums=3)
    close([rows["refresh"]["of_adamw"], rows["step"]["of_adamw"]], [2.0, 0.8], sums=3)
