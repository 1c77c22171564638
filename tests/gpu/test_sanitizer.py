"""compute-sanitizer finds nothing in any CUDA C++ or Triton op."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_kfac.ops.build import find_nvcc
from ds_kfac.ops.dispatch import BACKENDS, Backend
from tests.gpu.sanitized import run
from tests.ranks import ROOT

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


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
    plain = [sys.executable, "-m", "tests.gpu.sanitized", backend]
    # torch's allocator would hide reads beyond a tensor that stay inside its blocks
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    options = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE}
    options["stderr"] = subprocess.STDOUT
    # compiles, so that the tool does not look at that
    first = subprocess.run(plain, timeout=300, **options)
    assert first.returncode == 0, first.stdout[-4000:]
    command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    done = subprocess.run([*command, *plain], timeout=600, **options)
    unsupported = ("Device not supported", "Unable to find the debugger")
    if any(text in done.stdout for text in unsupported):
        pytest.skip(f"compute-sanitizer does not work on this machine: {done.stdout[:300]}")
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-6000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout


def test_the_script_calls_every_op_and_sees_its_faults(monkeypatch):
    count, wrong = run("torch", "cpu")
    assert count > 50 and not wrong
    broken = Backend("cpu", lambda: {"adam_step_": lambda *_, **__: None})
    monkeypatch.setitem(BACKENDS, "broken", broken)
    assert run("broken", "cpu")[1]
