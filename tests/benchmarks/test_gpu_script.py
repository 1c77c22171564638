"""benchmarks/gpu.sh: which program a call runs, where its results are, and that it ends in time."""

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = {
    "modes": "-m pytest -q -p no:cacheprovider tests/gpu/test_modes.py -k cuda",
    "step": "benchmarks/step.py --trace",
    "lm": "-m benchmarks.convergence final --tasks gpt2_small --rates kfacadamw_decay_1=4e-3",
    "images": "-m benchmarks.convergence sweep final --tasks cifar_resnet32 --data here",
    "kernels": "-m benchmarks.kernels --device cuda --models squares gpt2",
}


def call(tmp_path, *arguments: str, program="echo $MODES $*", **more: str) -> tuple[int, str]:
    """Run the script with a Python that only does ``program``."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{program}\n")
    python.chmod(0o755)
    own = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "SAVES": str(tmp_path / "saves")}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments]
    environment = os.environ | own | {"DATA": "here"} | more
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=100)
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_its_program_within_its_time_and_keeps_its_log(tmp_path, name):
    status, said = call(tmp_path, name, "--", "--more")
    assert status == 0 and CALLS[name] in said and "--more" in said
    line = next(line for line in said.splitlines() if CALLS[name] in line)
    if name == "modes":  # which has no time of its own
        assert line.startswith(f"{tmp_path}/out/modes ")
    else:
        option = "--seconds-in-all " if name == "kernels" else "--seconds "
        seconds = float(line.partition(option)[2].split()[0])
        assert name == "kernels" or 400 < seconds <= 450
        assert f"--out {tmp_path}/out/{name}" in line
    assert CALLS[name] in (tmp_path / "out" / name / "log.txt").read_text()
    # a rehearsal runs on a CPU at a small size
    status, said = call(tmp_path, name, "--rehearse", program="echo $DS_ACCELERATOR $*")
    programs = [line for line in said.splitlines() if line.startswith("cpu ")]
    (program,) = [line for line in programs if "costs" not in line and "import torch" not in line]
    assert status == 0 and not any(word in program for word in ("gpt2_small", "cifar", "cuda"))


def test_images_without_data_say_so_and_an_unknown_call_is_refused(tmp_path):
    assert call(tmp_path, "images", DATA="")[0] == 2
    status, said = call(tmp_path, "A")
    assert status == 2 and said.startswith("usage: gpu.sh modes | step | lm | images | kernels")


def test_a_program_that_hangs_is_ended(tmp_path):
    begin = time.monotonic()
    hangs = '[ "$1" = benchmarks/step.py ] && exec sleep 90; echo $*'
    status, said = call(tmp_path, "step", program=hangs, LIMIT="1")
    assert status == 124 and time.monotonic() - begin < 60 and "exit status 124" in said
