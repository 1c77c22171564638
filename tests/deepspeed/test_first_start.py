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

SHM, ADAM = "deepspeed_shm_comm", "fused_adam"
REMEDIES = {SHM: f'deepspeed.ops.__compatible_ops__["{SHM}"] = False', ADAM: '"torch_adam": true'}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
KFAC_ADAMW = {"type": "KFACAdamW", "params": {"torch_adam": True}}


def started(
    folder: Path, optimizer: dict, environment: dict[str, str], *options: str, shm: bool = False
) -> subprocess.CompletedProcess:
    """Train a model in a process of its own, with ds_kfac of this checkout.

    Args:
        environment: variables in addition to those of the tests without a launcher's.
        options: of Python.
        shm: whether DeepSpeed takes its communication by shared memory for compatible.
    """
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "kfac": {}}
    lines = [
        "import torch, deepspeed, ds_kfac",
        f"deepspeed.ops.__compatible_ops__['{SHM}'] = {shm}",
        "model = torch.nn.Linear(3, 3)",
        f"config = {config!r}",
        "ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)",
    ]
    (folder / "train.py").write_text("\n".join(lines))
    kept = {k: v for k, v in os.environ.items() if k not in (*RANK_VARIABLES, *OTHER_LAUNCHERS)}
    kept |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        [sys.executable, *options, str(folder / "train.py")],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "optimizer, launched, ops",
    [(TORCH_ADAMW, True, (SHM,)), (ADAMW, False, (ADAM,))],
)
def test_what_will_be_compiled_is_said_before_with_the_remedy(optimizer, launched, ops, tmp_path):
    """The compiler fails at once, and so does the run."""
    environment = {"CXX": "false", "TORCH_EXTENSIONS_DIR": str(tmp_path / "builds")}
    if launched:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = started(tmp_path, optimizer, environment, shm=True)
    lines = [line for line in run.stderr.splitlines() if line.startswith("ds_kfac")]
    line = lines[0 if launched else 1]  # without a launcher the first says so
    compiles = f"DeepSpeed now compiles {' and '.join(ops)} below {tmp_path / 'builds'}"
    assert line.startswith(f"ds_kfac: WARNING: {compiles}")
    assert "minutes" in line and all(REMEDIES[op] in line for op in ops)
    assert run.returncode != 0, "it was compiled"


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


@pytest.mark.skipif(
    bool(importlib.util.find_spec("mpi4py")),
    reason="with mpi4py DeepSpeed starts without a launcher",
)
def test_where_a_launchers_variables_are_incomplete_it_is_said_how_to_start(tmp_path):
    run = started(tmp_path, KFAC_ADAMW, {"WORLD_SIZE": "1"})
    assert run.returncode == 1 and "no launcher has started this process" in run.stderr
    assert "with `deepspeed train.py`" in run.stderr


def test_python_without_asserts_attaches(tmp_path):
    run = started(tmp_path, KFAC_ADAMW, {}, "-O")
    assert run.returncode == 0 and "ds_kfac updates 100%" in run.stderr, run.stderr[-2000:]
