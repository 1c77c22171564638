"""The benchmark of a step on one device works, for every method, and says what failed."""

import argparse
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step_gpu
from tests.close import close, near

ROOT = Path(__file__).parents[2]
TINY = "--width 16 --blocks 1 --heads 2 --context 5 --vocabulary 11 --rows 2 --periods 1".split()


def run(folder: Path, *options: str) -> list[dict]:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "MASTER_PORT": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "step_gpu.py"),
        *TINY,
        *options,
        "--out",
        str(folder),
    ]
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
        assert (
            int(found[method, "step"]["count"]) == 50
            and float(found[method, "step"]["memory_mb"]) > 0
        )
        assert (tmp_path / f"trace_{method}_step.json.gz").stat().st_size > 1000
    for method in ("KFACAdamW", "K-FAC into AdamW"):
        # steps 11 to 60
        assert [int(found[method, name]["count"]) for name in step_gpu.WEIGHTS] == [45, 4, 1]
        mean, base = found[method, step_gpu.ROW], float(found["AdamW", "step"]["median_ms"])
        assert int(mean["count"]) == 50
        ratio = float(mean["median_ms"]) / base
        near(float(mean["of_adamw"]), ratio, 2e-3 * ratio, "four digits are written")
        assert all((method, f"stage {name}, weighed") in found for name in step_gpu.STAGES)
        for kind in ("preconditioning_only", "factor_update"):
            assert (tmp_path / f"trace_{method}_{kind}.json.gz".replace(" ", "_")).exists()


@pytest.mark.distributed
def test_two_steps_of_every_stage(tmp_path):
    found = [(row["method"], row["stage"], row["what"]) for row in run(tmp_path, "--smoke")]
    methods = [method for method in step_gpu.METHODS if step_gpu.has_kfac(method)]
    assert found == [
        (method, stage, f"step {index}")
        for method in methods
        for stage in "0123"
        for index in range(2)
    ]


@pytest.mark.distributed
def test_operations_of_a_step_are_counted():
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels.adam_step",
        "--task",
        "tiny",
        "--steps",
        "4",
        "--together",
    ]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"kfacadamw: \d+ operations, [\d.]+ for each of 6 layers", done.stdout), (
        done.stdout
    )


def test_what_fails_is_a_row_and_not_the_end(tmp_path, monkeypatch):
    def fails(options, method):
        if method == "AdamW":
            raise RuntimeError("CUDA error: out of memory\nmore")
        return [("step", 1.0), ("step", 2.0)], 7.0

    monkeypatch.setattr(step_gpu, "measure", fails)
    options = {
        "out": tmp_path,
        "methods": ["AdamW", "Muon"],
        "stage": 1,
        "gpu": False,
        "smoke": False,
        "trace": False,
    }
    sizes = {"blocks": 1, "width": 8, "rows": 2, "context": 5}
    assert step_gpu.run(argparse.Namespace(**options, **sizes)) == 1
    with (tmp_path / "step_cpu_1x8.csv").open() as file:
        found = [
            (row["method"], row["what"], row["problem"], row["median_ms"])
            for row in csv.DictReader(file)
        ]
    assert found == [
        ("AdamW", "failed", "RuntimeError: CUDA error: out of memory", ""),
        ("Muon", "step", "", "1500"),
    ]


def test_the_mean_is_of_whole_intervals_and_set_against_adamws_median(monkeypatch):
    times = [("refresh", 3.0), ("preconditioning only", 1.0), ("preconditioning only", 1.4)]
    monkeypatch.setattr(step_gpu, "measure", lambda options, method: (times, 7.0))
    monkeypatch.setattr(step_gpu, "stages", lambda options, method: {})
    rows: list[dict] = []
    mean = step_gpu.rows_of(argparse.Namespace(), "KFACAdamW", 1.5, lambda **row: rows.append(row))
    close(mean, 1.8, sums=3)
    close([row["of_adamw"] for row in rows], [2.0, 0.8, 1.2], sums=4)
    assert [row["what"] for row in rows] == ["refresh", "preconditioning only", step_gpu.ROW]
