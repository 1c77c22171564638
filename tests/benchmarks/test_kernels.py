"""The kernels' benchmark: on a tiny model, with wrong implementations, without DeepSpeed."""

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels, kernels_solvers
from benchmarks.kernels_cases import Settings, layout
from benchmarks.kernels_shapes import MODELS, Conv, Model
from benchmarks.kernels_timing import Clock, Roofline
from ds_kfac.ops import functional
from ds_kfac.ops.backends import Backend

TINY = Model("tiny", ((7, 33), (33, 65)), 2, (Conv(3, 8, 3, 1),))
TIMED = (
    "syrk_accumulate_", "symmetric_pack_into_", "symmetric_unpack_from", "ema_update_", "similarity",
    "eigen_scale_dot", "corrected_scale_dot", "adam_scale", "patch_syrk_accumulate_",
)  # fmt: skip
SETTINGS = Settings("cpu", rows=16, blocks=2, max_dim=64, dtype=torch.float32, batch=2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command on the tiny model; returns its status, rows and page."""
    monkeypatch.setitem(MODELS, "tiny", TINY)
    roofline = Roofline(1e10, 1e10, "float32")
    monkeypatch.setattr(Clock, "roofline", lambda *_: roofline)

    def command(*options):
        arguments = ["--device", "cpu", "--models", "tiny", "--rows", "16", "--blocks", "2", "--max-dim", "64"]
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
        assert float(row["gb_per_s"]) == pytest.approx(int(row["bytes"]) / median / 1e6, rel=1e-2)
        bound = max(int(row["bytes"]), int(row["flops"])) / 1e10
        assert float(row["of_roofline"]) == pytest.approx(bound / median * 1e3, rel=1e-2)
    assert (tmp_path / "cpu.png").stat().st_size > 1000
    for fact in ("machine: ", f"torch: {torch.__version__}", "commit: "):
        assert fact in page


def test_a_wrong_implementation_has_no_speed_and_fails_the_command(run, monkeypatch):
    broken = Backend("cpu", lambda: {"eigen_scale_dot": lambda x, *rest: (x, x.sum() * torch.ones(2))})
    monkeypatch.setitem(kernels.BACKENDS, "broken", broken)
    status, rows, page = run("--ops", "eigen_scale_dot")
    assert status == 1
    wrong = [row for row in rows if row["implementation"] == "broken"]
    assert len(wrong) == 2 and all(row["median_ms"] == row["gb_per_s"] == "" for row in wrong)
    assert page.count("broken | **wrong**") == 2
    assert all(row["median_ms"] for row in rows if row["implementation"] == "torch")


def test_a_backend_that_cannot_run_says_why(run, monkeypatch):
    def load():
        raise RuntimeError("it is on holiday")

    monkeypatch.setitem(kernels.BACKENDS, "absent", Backend("cpu", load))
    assert "- not absent: it is on holiday" in run("--ops", "similarity")[2]


def spoiled(op: str, value: float):
    """The op, but one element of what it gives is changed: by a factor, or to ``value`` if that is not finite."""
    right = getattr(functional, op)

    def wrong(*arguments, **options):
        returned = right(*arguments, **options)
        first = returned if returned is not None and op != "ema_update_" else arguments[0]
        while isinstance(first, (list, tuple)):
            first = first[-1]
        place = first.abs().nan_to_num(nan=0).argmax()  # not a gap that nobody writes
        first.view(-1)[place] = first.view(-1)[place] * 1.01 if math.isfinite(value) else value
        return returned

    return wrong


@pytest.mark.parametrize("value", [1.01, math.nan, math.inf])
@pytest.mark.parametrize("op", TIMED)
def test_the_gate_sees_one_wrong_element(op, value):
    torch.manual_seed(0)
    for case in kernels.cases(TINY, SETTINGS, {op}):
        error, allowed = case.error(getattr(functional, op))
        assert error <= allowed
        error, allowed = case.error(spoiled(op, value))
        assert error > allowed


def test_costs_are_the_least_that_is_needed():
    found = {case.op: case for op in TIMED for case in kernels.cases(TINY, SETTINGS, {op})}
    dims = [7, 33, 33] * 2  # 65 is larger than allowed
    packed, squares = sum(dim * (dim + 1) // 2 for dim in dims), sum(dim * dim for dim in dims)
    assert TINY.factors(2, 64) == dims
    assert found["symmetric_pack_into_"].nbytes == (4 + 2) * packed
    assert found["symmetric_unpack_from"].nbytes == 2 * packed + 4 * squares
    assert found["ema_update_"].nbytes == 12 * packed
    assert found["syrk_accumulate_"].flops == 16 * 33 * 34
    assert found["syrk_accumulate_"].nbytes == 4 * 16 * 33 + 8 * 33 * 34 // 2
    assert found["patch_syrk_accumulate_"].flops == 2 * 8 * 8 * 27 * 28
    assert layout([7, 33])[0] == [0, 32]


def test_it_needs_no_deepspeed():
    code = "import sys; sys.modules['deepspeed'] = None; import benchmarks.kernels as k; print(len(k.OPS))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def small_solvers(monkeypatch):
    """Sizes that are timed, in place of hundreds to thousands."""
    monkeypatch.setattr(kernels_solvers, "DIMS", (33, 63))
    monkeypatch.setattr(kernels_solvers, "STACKS", ((5, 17),))
    monkeypatch.setattr(kernels_solvers, "LARGE", (33, 20, 600))
    monkeypatch.setattr(kernels_solvers, "grouped", lambda device: True)


def test_solvers_are_timed_beside_the_ops(run, small_solvers):
    status, rows, page = run("--ops", *kernels_solvers.SOLVERS)
    assert status == 0 and {row["op"] for row in rows} == set(kernels_solvers.SOLVERS)
    assert {(row["op"], row["implementation"]) for row in rows if row["kind"] == "op"} == {
        (op, name) for name, ops in kernels_solvers.IMPLEMENTATIONS.items() for op in ops
    }
    assert "| `eigh over streams` | 33, 20 | fp32 |" in page and "| `eigh batched` | 5 x 17 | fp64 |" in page


@pytest.mark.parametrize("value", [1.01, math.nan])
def test_the_gate_of_solvers_sees_a_wrong_element(small_solvers, value):
    def wrong(found):
        if isinstance(found, list):
            return [wrong(found[0]), *found[1:]]
        part = (found if torch.is_tensor(found) else found[-1]).clone(memory_format=torch.contiguous_format)
        part.view(-1)[part.abs().argmax()] *= value
        return part if torch.is_tensor(found) else (found[0], part)

    for case in kernels_solvers.solvers(SETTINGS, set(kernels_solvers.SOLVERS)):
        op = kernels_solvers.IMPLEMENTATIONS["fp32"][case.op]
        error, allowed = case.error(op)
        assert error <= allowed
        error, allowed = case.error(lambda *given, op=op: wrong(op(*given)))
        assert error > allowed, case.op
