"""What DeepSpeed compiles at a first start on a CPU is said before, with the remedy; and how to launch."""

import importlib.util
import os
import subprocess
import sys

import deepspeed
import pytest
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

from ds_kfac.engine.preflight import COMPILED, OF_OTHERS, OF_RANK, _warn_of_compilation, warn_of_compilation
from tests.deepspeed.said import heard
from tests.ranks import ROOT


def test_a_compilation_is_announced_until_it_is_done(monkeypatch, tmp_path):
    def texts() -> list[str]:
        _warn_of_compilation.cache_clear()
        with heard() as said:
            warn_of_compilation()
        return said

    def told(variable: str) -> bool:
        """Whether a process that becomes a rank after :func:`ds_kfac.enable` is told at ``initialize``."""
        _warn_of_compilation.cache_clear()
        with heard() as said, monkeypatch.context() as later:
            warn_of_compilation()
            assert not said, "a launcher"
            later.setenv(variable, "0")
            warn_of_compilation()
        return bool(said)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, COMPILED, True)
    for name in (*OF_RANK, *OF_OTHERS):
        monkeypatch.delenv(name, raising=False)
    assert told("RANK") and told("OMPI_COMM_WORLD_RANK")
    monkeypatch.setenv("RANK", "0")
    assert f"compiles {ShareMemCommBuilder.NAME} below {tmp_path}" in "".join(texts())
    (tmp_path / "py311_cpu" / COMPILED).mkdir(parents=True)
    assert "remove the file lock" in "".join(texts())
    (tmp_path / "py311_cpu" / COMPILED / f"{COMPILED}.so").touch()
    assert texts() == []
    (tmp_path / "py311_cpu" / COMPILED / f"{COMPILED}.so").unlink()
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, COMPILED, False)
    assert texts() == []


SCRIPT = """
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import ds_kfac
model = torch.nn.Linear(3, 3)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "KFACAdamW", "params": {"torch_adam": True}}}
ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)
"""


@pytest.mark.skipif(bool(importlib.util.find_spec("mpi4py")), reason="with mpi4py DeepSpeed starts without a launcher")
def test_where_a_launchers_variables_are_incomplete_it_is_said_how_to_start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    kept |= {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "1"}
    run = subprocess.run([sys.executable, str(script)], env=kept, capture_output=True, text=True, timeout=300,
                         check=False)  # fmt: skip
    assert run.returncode == 1
    assert "no launcher has started this process" in run.stderr and "start it with `deepspeed train.py`" in run.stderr


def test_python_without_asserts_attaches(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, "-O", str(script)]
    run = subprocess.run(command, env=kept | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}, capture_output=True,
                         text=True, timeout=300, check=False)  # fmt: skip
    assert run.returncode == 0 and "ds_kfac steps 100%" in run.stderr, run.stderr[-2000:]
