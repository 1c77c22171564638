"""A notebook's user: one process that no launcher has started, without variables of one."""

import os
import re

import deepspeed
import pytest

from ds_kfac.diagnostics import preflight
from tests.programs import python
from tests.ranks import ROOT

NOTEBOOK = ROOT / "examples/quickstart.ipynb"
RUN = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
print("LOSSES", names["kfac"], names["adamw"])
"""
SAYS = "no launcher has started this process: it is a job of one rank, on "
LAUNCHERS = (*preflight.RANK_VARIABLES, *preflight.OTHER_LAUNCHERS)
OURS = (*LAUNCHERS, "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


def test_the_notebook_runs_without_a_launcher_and_kfac_ends_lower(tmp_path):
    empty = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built")}
    command = ["-c", RUN, str(NOTEBOOK)]
    done = python(*command, folder=tmp_path, path=str(ROOT), without=OURS, **empty)
    kfac, adamw = map(float, re.search(r"LOSSES (\S+) (\S+)", done.stdout).groups())
    assert kfac < adamw - 0.1 and "<ds_kfac.Attachment: KFACAdamW" in done.stdout, (kfac, adamw)
    assert done.stderr.count(SAYS) == 1, "once, also with a second engine"
    assert not list((tmp_path / "built").rglob("*")), "nothing is compiled"


@pytest.fixture
def nobody(monkeypatch):
    """No launcher, and no process group."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(deepspeed.comm, "is_initialized", lambda: False)
    monkeypatch.setattr(deepspeed.comm.torch.torch.distributed, "is_initialized", lambda: False)
    assert preflight.alone()
    return monkeypatch


def test_a_launchers_process_is_left_alone(nobody):
    for name in LAUNCHERS:
        nobody.setenv(name, "1")
        assert not preflight.alone(), name
        preflight.start_alone()
        assert "MASTER_PORT" not in os.environ, name
        nobody.delenv(name)


def test_a_task_of_slurm_is_alone_if_it_is_the_only_one_and_a_users_process_group_is_not(nobody):
    nobody.setenv("SLURM_PROCID", "0")
    for tasks in (8, 1):
        nobody.setenv("SLURM_NTASKS", str(tasks))
        assert preflight.alone() == (tasks == 1)
    nobody.setattr(deepspeed.comm, "is_initialized", lambda: True)
    assert not preflight.alone()
