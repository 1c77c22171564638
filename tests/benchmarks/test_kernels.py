"""The kernels' benchmark: on a tiny model, with wrong implementations, without DeepSpeed."""

import csv
import math

import pytest
import torch

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import newton_schulz
from benchmarks.kernels import solvers as kernels_solvers
from benchmarks.kernels.cases import Settings
from benchmarks.kernels.shapes import MODELS, Model
from benchmarks.kernels.timing import Clock, Roofline
from ds_kfac.ops import functional
from ds_kfac.ops.dispatch import Backend
from tests.close import near
from tests.ops.calls import spoiled
from tests.programs import python
from tests.ranks import ROOT

TINY = Model("tiny", ((7, 33), (33, 65)), 2)
TIMED = ("syrk_accumulate_", "symmetric_pack_into_", "symmetric_unpack_from")
TIMED += ("ema_update_", "adam_step_")
SETTINGS = Settings("cpu", rows=16, blocks=2, max_dim=64, dtype=torch.float32)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command on the tiny model; returns its status, rows and page."""
    monkeypatch.setitem(MODELS, "tiny", TINY)
    roofline = Roofline(1e10, 1e10, "float32")
    monkeypatch.setattr(Clock, "roofline", lambda *_: roofline)

    def command(*options):
        arguments = "--device cpu --models tiny --rows 16 --blocks 2 --max-dim 64".split()
        status = kernels.main([*arguments, "--seconds", "0", "--out", str(tmp_path), *options])
        with (tmp_path / "cpu.csv").open() as file:
            return status, list(csv.DictReader(file)), (tmp_path / "cpu.md").read_text()

    return command


def test_every_op_has_a_speed_and_a_baseline(run, tmp_path):
    status, rows, page = run("--ops", *TIMED)
    assert status == 0
    assert {row["op"] for row in rows} == set(TIMED)
    for op in TIMED:
        kinds = {row["kind"]: row for row in rows if row["op"] == op}
        assert set(kinds) == {"op", "baseline"} and f"| `{op}` |" in page
    for row in rows:
        low, median, high = (float(row[name]) for name in ("low_ms", "median_ms", "high_ms"))
        assert 0 < low <= median <= high and int(row["calls"]) >= 5
        rate = int(row["bytes"]) / median / 1e6
        near(float(row["gb_per_s"]), rate, rate / 100, "three digits are written")
        bound = max(int(row["bytes"]), int(row["flops"])) / 1e10
        allowed = bound / median * 10
        near(float(row["of_roofline"]), 100 * allowed, allowed, "three digits are written")
    assert (tmp_path / "cpu.png").stat().st_size > 1000
    for fact in ("machine: ", f"torch: {torch.__version__}", "commit: "):
        assert fact in page


def test_what_is_wrong_fails_or_cannot_run_is_said_and_not_the_end(run, monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def away():
        raise RuntimeError("it is on holiday")

    def offer(name, load):
        monkeypatch.setitem(kernels.BACKENDS, name, Backend("cpu", load))

    offer("broken", lambda: {"symmetric_pack_into_": lambda *_, **__: None})
    offer("full", lambda: {"symmetric_pack_into_": no_memory})
    offer("absent", away)
    monkeypatch.setattr(kernels, "adam_step", no_memory)
    status, rows, page = run("--ops", "symmetric_pack_into_", "adam_step_")
    text = "OutOfMemoryError: CUDA out of memory"
    problems = {(row["op"], row["implementation"]): row["problem"] for row in rows}
    assert status == 1 and problems["symmetric_pack_into_", "full"] == text
    assert problems["not made", ""] == text
    for told in (f"full | **wrong**: {text} |", "broken | **wrong**", "not absent: it is on holi"):
        assert told in page, told
    fine = {row["implementation"] for row in rows if row["median_ms"]}
    assert "torch" in fine and not fine & {"broken", "full", "absent"}


@pytest.mark.parametrize("value", [1.01, math.nan])
@pytest.mark.parametrize("op", TIMED)
def test_the_gate_sees_one_wrong_element(op, value):
    torch.manual_seed(0)
    cases = [case for make in kernels.cases(TINY, SETTINGS, {op}) for case in make()]
    for case in cases:
        error, allowed = case.error(getattr(functional, op))
        assert error <= allowed
        error, allowed = case.error(spoiled(op, value))
        assert error > allowed


def test_it_needs_no_deepspeed():
    code = "import sys; sys.modules['deepspeed'] = None; import benchmarks.kernels.__main__"
    python("-c", code, folder=ROOT)


def test_solvers_and_newton_schulz_are_timed_with_the_ops(run, monkeypatch):
    monkeypatch.setattr(kernels_solvers, "DIMS", (33, 63))
    monkeypatch.setattr(kernels_solvers, "STACKS", ((5, 17),))
    monkeypatch.setattr(newton_schulz, "SHAPES", ((2, 20, 64),))
    status, rows, page = run("--ops", "newton schulz", *kernels_solvers.SOLVERS)
    assert status == 0 and "| `iteration` | 5 x 17 | fp32 |" in page
    timed = {(row["op"], row["implementation"]) for row in rows if row["median_ms"]}
    assert {op for op, _ in timed} == {"newton schulz", *kernels_solvers.SOLVERS}
    offered = kernels_solvers.IMPLEMENTATIONS.items()
    assert timed >= {(op, name) for name, ops in offered for op in ops}
    assert ("newton schulz", "published, fp32") in timed


def test_a_call_goes_on_where_the_last_one_had_no_time_left(run, capsys):
    assert run("--ops", "ema_update_")[0] == 0
    status, rows, _ = run("--ops", "ema_update_", "adam_step_", "--seconds-in-all", "-1")
    assert status == 0 and {row["op"] for row in rows} == {"ema_update_"}
    assert "goes on: 2 cases" in capsys.readouterr().out
    before = [row for row in rows if row["op"] == "ema_update_"]
    status, rows, page = run("--ops", "ema_update_", "adam_step_")
    assert status == 0 and [row for row in rows if row["op"] == "ema_update_"] == before
    assert {row["op"] for row in rows} == {"ema_update_", "adam_step_"}
    assert "| `ema_update_` |" in page and "goes on: no cases" in capsys.readouterr().out
