"""What DeepSpeed compiles at a first start on a CPU is said before, with the remedy; and how to
launch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest

import ds_kfac
from ds_kfac.diagnostics import preflight
from ds_kfac.diagnostics.preflight import OTHER_LAUNCHERS, RANK_VARIABLES
from ds_kfac.engine import entry
from tests.deepspeed.said import heard
from tests.ranks import ROOT, free_port

FIRST = """
import torch, deepspeed, ds_kfac
model = torch.nn.Linear(3, 3)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": OPTIMIZER, "kfac": {}}
ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)
"""
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
SHM, ADAM = "deepspeed_shm_comm", "fused_adam"


def environment_without(*variables: str) -> dict[str, str]:
    """Return the environment without these variables."""
    return {key: value for key, value in os.environ.items() if key not in variables}


def started(script: Path, environment: dict[str, str], *options: str):
    """Run a script in a process of its own, with ds_kfac of this checkout."""
    return subprocess.run(
        [sys.executable, *options, str(script)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "optimizer, launched, ops",
    [
        (ADAMW, True, (SHM, ADAM)),
        (TORCH_ADAMW, True, (SHM,)),
        (ADAMW, False, (ADAM,)),
    ],
)
def test_what_will_be_compiled_is_said_before_with_the_remedy(optimizer, launched, ops, tmp_path):
    """The compiler fails at once, and so does the run."""
    script = tmp_path / "train.py"
    imports, rest = FIRST.replace("OPTIMIZER", repr(optimizer)).split("ds_kfac\n", 1)
    script.write_text(f"{imports}ds_kfac\ndeepspeed.ops.__compatible_ops__['{SHM}'] = True\n{rest}")
    kept = environment_without(*RANK_VARIABLES, *OTHER_LAUNCHERS)
    if launched:
        kept |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        kept["MASTER_PORT"] = str(free_port())
    kept |= {"DS_ACCELERATOR": "cpu", "CXX": "false"}
    kept["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "builds")
    run = started(script, kept)
    lines = [line for line in run.stderr.splitlines() if line.startswith("ds_kfac")]
    line = lines[0 if launched else 1]  # without a launcher the first says so
    assert line.startswith(
        f"ds_kfac: WARNING: DeepSpeed now compiles {' and '.join(ops)} below {tmp_path / 'builds'}"
    )
    assert "minutes" in line and all(remedy in line for op, remedy in WITHOUT.items() if op in ops)
    assert run.returncode != 0, "it was compiled"


WITHOUT = {SHM: f'deepspeed.ops.__compatible_ops__["{SHM}"] = False', ADAM: '"torch_adam": true'}


def test_a_rank_is_warned_by_enable_and_a_launcher_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, SHM, True)
    monkeypatch.setattr(entry, "_enabled", None)
    for name in (*RANK_VARIABLES, *OTHER_LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setattr(preflight, "_announced", set())
        with heard() as said, monkeypatch.context() as later:
            ds_kfac.enable()
            assert not said, "a launcher"
            later.setenv(variable, "0")
            ds_kfac.enable()
            ds_kfac.enable()
        assert len(said) == 1 and SHM in said[0], "once"


SCRIPT = """
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import ds_kfac
model = torch.nn.Linear(3, 3)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "KFACAdamW", "params": {"torch_adam": True}}}
ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)
"""  # noqa: E501


@pytest.mark.skipif(
    bool(importlib.util.find_spec("mpi4py")),
    reason="with mpi4py DeepSpeed starts without a launcher",
)
def test_where_a_launchers_variables_are_incomplete_it_is_said_how_to_start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kept = environment_without("RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept["WORLD_SIZE"] = "1"
    run = started(script, kept)
    assert run.returncode == 1
    assert (
        "no launcher has started this process" in run.stderr
        and "start it with `deepspeed train.py`" in run.stderr
    )


def test_python_without_asserts_attaches(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kept = environment_without("RANK", "LOCAL_RANK", "WORLD_SIZE")
    run = started(script, kept | {"DS_ACCELERATOR": "cpu"}, "-O")
    assert run.returncode == 0 and "ds_kfac steps 100%" in run.stderr, run.stderr[-2000:]
