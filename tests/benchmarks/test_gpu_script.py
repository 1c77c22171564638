"""benchmarks/gpu.sh: which program a call runs, where its results are, and that it ends in time."""

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "modes": "-m tests.gpu.modes",
    "step": "benchmarks/step.py",
    "lm": "-m benchmarks.convergence",
    "images": "-m benchmarks.convergence",
    "kernels": "-m benchmarks.kernels",
}


def call(tmp_path, *arguments: str, program="echo $*", **more: str) -> tuple[int, str]:
    """Run the script with a Python that only does ``program``."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{program}\n")
    python.chmod(0o755)
    own = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "SAVES": str(tmp_path / "saves")}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments]
    environment = os.environ | own | {"DATA": "here"} | more
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=100)
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_runs_its_program_within_its_time_and_keeps_its_log(tmp_path, name):
    status, said = call(tmp_path, name, "--", "--more")
    line = next(line for line in said.splitlines() if "--more" in line)
    assert status == 0 and PROGRAMS[name] in line and f"--out {tmp_path}/out/{name}" in line
    option = "--seconds-in-all " if name == "kernels" else "--seconds "
    assert 400 < float(line.partition(option)[2].split()[0]) <= 450
    assert line in (tmp_path / "out" / name / "log.txt").read_text()
    # a rehearsal runs on a CPU at a small size
    status, said = call(tmp_path, name, "--rehearse", program="echo $DS_ACCELERATOR $*")
    program = next(line for line in said.splitlines() if "--out" in line and "costs" not in line)
    assert status == 0 and program.startswith("cpu ")
    assert "gpt2_small" not in program and "cifar" not in program


def test_images_without_data_and_an_unknown_call_are_refused_and_what_hangs_is_ended(tmp_path):
    assert call(tmp_path, "images", DATA="")[0] == 2
    status, said = call(tmp_path, "A")
    assert status == 2 and said.startswith("usage: gpu.sh modes | step | lm | images | kernels")
    begin = time.monotonic()
    hangs = '[ "$1" = benchmarks/step.py ] && exec sleep 90; echo $*'
    status, said = call(tmp_path, "step", program=hangs, LIMIT="1")
    assert status == 124 and time.monotonic() - begin < 60 and "exit status 124" in said
