"""Benchmarks without a test of their own run to their end at a small size: what they read of the
package is there."""

import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT, free_port

pytestmark = pytest.mark.distributed
COSTS = str(ROOT / "benchmarks/results/gpu/costs.json")
COMMANDS = {
    "benchmarks/proof.py": ("--width", "64", "--tokens", "256", "--blocks", "1", "--pairs", "2"),
    "benchmarks/step.py": (
        "--rows",
        "1",
        "--width",
        "64",
        "--blocks",
        "1",
        "--context",
        "16",
        "--stage",
        "2",
    ),
    "benchmarks/predicted.py": ("--costs", COSTS, "--periods", "1"),
    "-m benchmarks.kernels.adam_step": ("--task", "tiny", "--steps", "5"),
}
SAID = {
    "benchmarks/proof.py": "one that proves, too",
    "benchmarks/step.py": "refresh",
    "benchmarks/predicted.py": "GPT, width 128, KFACAdamW",
    "-m benchmarks.kernels.adam_step": "kfacadamw",
}


@pytest.mark.parametrize("script", COMMANDS)
def test_it_runs_to_its_end(script, tmp_path):
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, *script.split(), *COMMANDS[script]]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=600
    )
    assert done.returncode == 0 and SAID[script] in done.stdout, (
        done.stdout[-2000:] + done.stderr[-4000:]
    )
