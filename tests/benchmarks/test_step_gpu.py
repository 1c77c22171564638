"""The benchmark of a step on one device works, for every method, and says what failed."""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step_gpu
from tests.close import close, near

ROOT = Path(__file__).parents[2]
TINY = "--width 16 --blocks 1 --heads 2 --context 5 --vocabulary 11 --rows 2 --steps 42".split()


def run(folder: Path, *options: str) -> list[dict]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "step_gpu.py"), *TINY, *options, "--out", str(folder)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (path,) = folder.glob("*.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.distributed
def test_every_method_kind_of_step_and_stage_is_timed_and_recorded(tmp_path):
    rows = run(tmp_path, "--kfac", '{"damping": {"value": 0.5}}', "--trace")
    found = {(row["method"], row["what"]): row for row in rows}
    for method in ("AdamW", "Muon"):
        assert int(found[method, "step"]["count"]) == 15 and float(found[method, "step"]["memory_mb"]) > 0
        assert (tmp_path / f"trace_{method}_step.json.gz").stat().st_size > 1000
    for method in ("KFACAdamW", "K-FAC into AdamW"):
        assert [int(found[method, name]["count"]) for name in step_gpu.WEIGHTS] == [29, 5, 2]  # steps 6 to 41
        medians = {name: float(found[method, name]["median_ms"]) for name in step_gpu.WEIGHTS}
        weighed = sum(weight * medians[name] for name, weight in step_gpu.WEIGHTS.items())
        near(float(found[method, step_gpu.ROW]["median_ms"]), weighed, 1e-3 * weighed, "four digits are written")
        assert all((method, f"stage {name}, weighed") in found for name in step_gpu.STAGES)
        for kind in ("preconditioning_only", "factor_update"):
            assert (tmp_path / f"trace_{method}_{kind}.json.gz".replace(" ", "_")).exists()


@pytest.mark.distributed
def test_two_steps_of_every_stage(tmp_path):
    found = [(row["method"], row["stage"], row["what"]) for row in run(tmp_path, "--smoke")]
    methods = [method for method in step_gpu.METHODS if step_gpu.has_kfac(method)]
    assert found == [(method, stage, f"step {index}") for method in methods for stage in "0123" for index in range(2)]


def test_what_fails_is_a_row_and_not_the_end(tmp_path, monkeypatch):
    def fails(options, method):
        if method == "AdamW":
            raise RuntimeError("CUDA error: out of memory\nmore")
        return {"step": [1.0, 2.0]}, 7.0

    monkeypatch.setattr(step_gpu, "measure", fails)
    options = {"out": tmp_path, "methods": ["AdamW", "Muon"], "stage": 1, "gpu": False, "smoke": False, "trace": False}
    sizes = {"blocks": 1, "width": 8, "rows": 2, "context": 5}
    assert step_gpu.run(argparse.Namespace(**options, **sizes)) == 1
    with (tmp_path / "step_cpu_1x8.csv").open() as file:
        found = [(row["method"], row["what"], row["problem"], row["median_ms"]) for row in csv.DictReader(file)]
    assert found == [("AdamW", "failed", "RuntimeError: CUDA error: out of memory", ""), ("Muon", "step", "", "1500")]


def test_overhead_weighs_kinds_of_steps_and_misses_none():
    medians = {"preconditioning only": 1.1, "factor update": 1.5, "refresh": 3.0}
    more = 0.9 * 0.1 + 0.08 * 0.5 + 0.02 * 2.0
    close(step_gpu.overhead(medians, 1.0), more, sums=4, scale=1.0 + more)  # what is left of 1.17 - 1
    del medians["refresh"]
    with pytest.raises(ValueError, match="no step of kind refresh was timed: more --steps"):
        step_gpu.overhead(medians, 1.0)
