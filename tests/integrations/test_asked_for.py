"""K-FAC was asked for and no engine got it: said once, at the end, by rank 0; by the real launchers
where they are."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.examples.runs import one_rank
from tests.programs import python
from tests.ranks import ROOT, free_port

ASKED = "K-FAC was asked for, but this program has trained without it"
TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
"""
ACCELERATED = """
from accelerate import Accelerator
import torch
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(3, 2)).sum())
optimizer.step()
"""
SET = "import os; os.environ['DS_KFAC'] = '1'\n"


def said(folder: Path, code: str, *launcher: str, status: int = 0, **variables: str) -> str:
    """What a program writes to standard error, where ds_kfac.pth is at work."""
    (folder / "sitecustomize.py").write_text((ROOT / "ds_kfac.pth").read_text())
    (folder / "train.py").write_text(code)
    path, variables = f"{folder}{os.pathsep}{ROOT}", {"DS_KFAC": "1"} | variables
    arguments = [*launcher, "train.py"]
    return python(*arguments, folder=folder, path=path, status=status, **variables).stderr


NO_IMPORT = "deepspeed was never imported"
NO_CALL = "deepspeed.initialize was never called"
LATE = "when deepspeed had been imported already"
OFF = {"DS_KFAC": ""}


@pytest.mark.parametrize(
    ("code", "variables", "why"),
    [
        (TRAINS, {}, f"{NO_IMPORT}.*--use_deepspeed"),
        ("import deepspeed\n" + TRAINS, {}, NO_CALL),
        (SET + TRAINS, OFF, NO_IMPORT),
        ("import deepspeed\n" + SET + TRAINS, OFF, LATE),
        ("import ds_kfac\n" + SET + TRAINS, OFF, NO_CALL),
        pytest.param("import torch", {}, "", id="it does not train"),
        pytest.param(TRAINS, {"RANK": "1"}, "", id="another rank says it"),
        pytest.param(TRAINS, {"DS_KFAC": "0"}, "", id="switched off"),
        pytest.param(TRAINS + "raise ValueError('mine')", {}, "", id="its own error says enough"),
    ],
)
def test_a_program_that_trained_without_it_is_told_of_and_why(code, variables, why, tmp_path):
    text = said(tmp_path, code, status=int("raise" in code), **variables)
    assert text.count(ASKED) == bool(why) and re.search(why, text, re.S), text


CONFIGS = {
    "AdamW": {},
    "KFACAdamW": {},
    "AdamW, kfac": {"kfac": {}},
    "AdamW, no kfac": {"kfac": {"enabled": False}},
}
ENGINES = f"""
import os, sys, deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
for name, more in {CONFIGS}.items():
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
    model = torch.nn.Linear(4, 4)
    optimizer = {{"type": name.split(",")[0], "params": {{"lr": 1e-3, "torch_adam": True}}}}
    config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, **more}}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sys.exit()
"""


def test_an_engine_whose_config_does_not_name_it_is_told_of(tmp_path):
    """Each is a process that ends, forked from one that has imported DeepSpeed."""
    assert ASKED not in said(tmp_path, ENGINES, **one_rank())
    for name in CONFIGS:
        text = (tmp_path / name).read_text()
        for part in (ASKED, "the DeepSpeed config does not name K-FAC"):
            assert (part in text) == (name == "AdamW"), (name, text)


@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"), reason="needs ds_kfac[integrations]"
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_without_deepspeed_is_told_of_once(ranks, tmp_path):
    port = ["--main_process_port", str(free_port())] if ranks > 1 else []
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks), *port]
    text = said(tmp_path, ACCELERATED, *launcher)
    assert text.count(ASKED) == 1, text
