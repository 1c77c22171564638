"""What DeepSpeed compiles at a first start on a CPU is said before, with the remedy; and how to
launch."""

from importlib.util import find_spec
from pathlib import Path

import deepspeed
import pytest

import ds_kfac
from ds_kfac.diagnostics import preflight
from ds_kfac.diagnostics.preflight import OTHER_LAUNCHERS, RANK_VARIABLES
from ds_kfac.engine import entry
from tests.deepspeed.said import heard
from tests.examples.runs import one_rank
from tests.programs import python
from tests.ranks import ROOT

SHM, LAUNCHERS = "deepspeed_shm_comm", (*RANK_VARIABLES, *OTHER_LAUNCHERS)
NOT_SHM = f'deepspeed.ops.__compatible_ops__["{SHM}"] = False'
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
KFAC_ADAMW = {"type": "KFACAdamW", "params": {"torch_adam": True}}


def started(folder: Path, optimizer: dict, *options: str, **variables: str):
    """Train a model in a process of its own, with ds_kfac of this checkout and without a launcher's
    variables. Its communication by shared memory DeepSpeed compiles with a compiler that fails, or
    not at all."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "kfac": {}}
    (folder / "train.py").write_text(
        "import torch, deepspeed, ds_kfac\n"
        f"deepspeed.ops.__compatible_ops__['{SHM}'] = {'CXX' in variables}\n"
        "model = torch.nn.Linear(3, 3)\n"
        "ds_kfac.initialize("
        f"model=model, model_parameters=model.parameters(), config={config!r})"
    )
    plain = {"folder": folder, "path": str(ROOT), "status": None, "DS_ACCELERATOR": "cpu"}
    return python(*options, "train.py", without=LAUNCHERS, **plain, **variables)


@pytest.mark.parametrize("launched", [True, False])
def test_what_will_be_compiled_is_said_before_with_the_remedy(launched, tmp_path):
    """The compiler fails at once, and so does the run."""
    op, remedy = (SHM, NOT_SHM) if launched else ("fused_adam", '"torch_adam": true')
    optimizer = TORCH_ADAMW if launched else ADAMW
    variables = {"CXX": "false", "TORCH_EXTENSIONS_DIR": str(tmp_path / "builds")}
    run = started(tmp_path, optimizer, **variables, **(one_rank() if launched else {}))
    lines = [line for line in run.stderr.splitlines() if line.startswith("ds_kfac")]
    line = lines[0 if launched else 1]  # without a launcher the first says so
    compiles = f"DeepSpeed now compiles {op} below {tmp_path / 'builds'}"
    assert line.startswith(f"ds_kfac: WARNING: {compiles}")
    assert "minutes" in line and remedy in line
    assert run.returncode != 0, "it was compiled"


def test_a_rank_is_warned_by_enable_and_a_launcher_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, SHM, True)
    monkeypatch.setattr(entry, "_enabled", None)
    for name in LAUNCHERS:
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


@pytest.mark.skipif(bool(find_spec("mpi4py")), reason="DeepSpeed starts without a launcher then")
def test_where_a_launchers_variables_are_incomplete_it_is_said_how_to_start(tmp_path):
    run = started(tmp_path, KFAC_ADAMW, WORLD_SIZE="1")
    assert run.returncode == 1 and "no launcher has started this process" in run.stderr
    assert "with `deepspeed train.py`" in run.stderr


def test_python_without_asserts_attaches(tmp_path):
    run = started(tmp_path, KFAC_ADAMW, "-O")
    assert run.returncode == 0 and "ds_kfac updates 100%" in run.stderr, run.stderr[-2000:]
