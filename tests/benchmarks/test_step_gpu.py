"""The benchmark of a step on one device works; the script for GPUs runs everything and tells what failed."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step_gpu

ROOT = Path(__file__).parents[2]
TINY = "--width 8 --blocks 1 --heads 2 --context 5 --vocabulary 11 --rows 2 --steps 42".split()


@pytest.mark.distributed
def test_every_kind_of_step_and_stage_is_timed(tmp_path):
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    options = ["--kfac", '{"damping": {"value": 0.5}}', "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "step_gpu.py"), *TINY, *options]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "blocks.0.mlp.down" in done.stdout and "wanted below 15%" in done.stdout
    with open(tmp_path / "step_cpu_1x8.csv") as file:
        found = {row["what"]: row for row in csv.DictReader(file)}
    assert [int(found[name]["steps"]) for name in step_gpu.WEIGHTS] == [29, 5, 2]  # steps 6 to 41
    medians = {name: float(row["median ms"]) for name, row in found.items()}
    assert all(median > 0 for median in medians.values())
    weighed = sum(weight * medians[name] for name, weight in step_gpu.WEIGHTS.items())
    assert medians["mean at intervals 10/50"] == pytest.approx(weighed)
    assert set(found) > {f"stage {name}" for name in step_gpu.STAGES}
    assert (tmp_path / "step_cpu_1x8.md").exists()


def test_overhead_weighs_kinds_of_steps_and_misses_none():
    times = {"AdamW": [1.0, 1.0], "preconditioning only": [1.1], "factor update": [1.5], "refresh": [3.0]}
    assert step_gpu.overhead(times)[1] == pytest.approx(0.9 * 0.1 + 0.08 * 0.5 + 0.02 * 2.0)
    with pytest.raises(SystemExit, match="no step of kind refresh was timed: more --steps"):
        step_gpu.overhead({**times, "refresh": []})


@pytest.mark.parametrize("broken", [None, "step_gpu.py", "test_sanitizer.py"])
def test_the_script_runs_all_and_tells_what_failed(tmp_path, broken):
    python = tmp_path / "python"
    fail = f'case "$*" in *{broken}*) echo went wrong; exit 3;; esac' if broken else ""
    python.write_text(f"#!/bin/sh\n{fail}\necho did it\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh")]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)
    lines = {line.split()[0]: line for line in (tmp_path / "out" / "summary_all.txt").read_text().splitlines()}
    parts = ["machine", "ops", "modes", "sanitizer_triton", "sanitizer_cuda", "others", "sweep", "goals", "goals_2048"]
    assert set(lines) == {*parts, "step", "models"}
    wrong = {"step_gpu.py": {"step"}, "test_sanitizer.py": {"sanitizer_triton", "sanitizer_cuda"}, None: set()}[broken]
    assert {name for name, line in lines.items() if "failed (3)" in line and "went wrong" in line} == wrong
    assert done.returncode == bool(wrong) and sum("passed" in line for line in lines.values()) == 11 - len(wrong)
