"""compute-sanitizer finds nothing in any CUDA C++ or Triton op.

It runs this file as a program, ``python -m tests.gpu.test_sanitizer triton``: small calls of every
op of a backend. Results are compared on the CPU, so that on the GPU there are copies and the ops
alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_kfac.ops.build import find_nvcc
from ds_kfac.ops.dispatch import BACKENDS
from tests.ops.calls import Sizes, calls_of, copied, problems
from tests.ranks import ROOT

SIZES = Sizes((1, 129), (1, 63, 129, 576), (1, 63, 129, 300), ((1, 1), (63, 129), (257, 600)))
"""Odd ones, and one that has several tiles and whole descriptors."""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
UNSUPPORTED = ("Device not supported", "Unable to find the debugger")
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")


def run(backend: str, device: str = "cuda") -> tuple[int, list[str]]:
    """Number of calls, and what was wrong."""
    count, wrong = 0, []
    for op, function in BACKENDS[backend].load().items():
        for call in calls_of(op, "cpu", SIZES):
            arguments, options = copied((call.arguments, call.options), device=device)
            results = copied((function(*arguments, **options), arguments), device="cpu")
            count += 1
            wrong += [f"{op}: {text}" for text in problems(call, *results)]
    return count, wrong


def sanitizer() -> str | None:
    """On the path, or next to nvcc."""
    near = Path(find_nvcc() or "/").parent / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(near) if near.exists() else None)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool, backend):
    program = sanitizer()
    if program is None:
        pytest.skip("no compute-sanitizer on the path or next to nvcc")
    # torch's allocator would hide reads beyond a tensor that stay inside its blocks
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    options = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE}
    plain = [sys.executable, "-m", "tests.gpu.test_sanitizer", backend]
    # compiles, so that the tool does not look at that
    first = subprocess.run(plain, timeout=300, stderr=subprocess.STDOUT, **options)
    assert first.returncode == 0, first.stdout[-4000:]
    command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *plain]
    done = subprocess.run(command, timeout=600, stderr=subprocess.STDOUT, **options)
    if any(text in done.stdout for text in UNSUPPORTED):
        pytest.skip(f"compute-sanitizer does not work on this machine: {done.stdout[:300]}")
    assert done.returncode == 0, done.stdout[-6000:]
    assert any(text in done.stdout for text in CLEAN), done.stdout[-2000:]


def test_the_program_calls_every_op():
    count, wrong = run("torch", "cpu")
    assert count > 50 and not wrong


if __name__ == "__main__":
    number, faults = run(sys.argv[1])
    print(f"{number} calls, {len(faults)} wrong", *faults, sep="\n")
    torch.cuda.synchronize()
    sys.exit(bool(faults) or not number)
