"""K-FAC was asked for and no engine got it: said once, at the end, by rank 0; by the real launchers
where they are."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def said(folder: Path, code: str, *launcher: str, status: int = 0, **variables: str) -> str:
    """What a program writes to standard error, where ds_kfac.pth is at work."""
    (folder / "sitecustomize.py").write_text((ROOT / "ds_kfac.pth").read_text())
    script = folder / "train.py"
    script.write_text(code)
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("DS_KFAC", "RANK", "LOCAL_RANK")
    }
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "DS_KFAC": "1"}
    command = [sys.executable, *launcher, str(script)]
    run = subprocess.run(
        command, env=kept | paths | variables, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == status, run.stderr
    return run.stderr


def test_a_program_without_deepspeed_is_told_of(tmp_path):
    text = said(tmp_path, TRAINS)
    assert (
        text.count(ASKED) == 1
        and "deepspeed was never imported" in text
        and "--use_deepspeed" in text
    )


@pytest.mark.parametrize(
    "case",
    [
        ("it does not train", "import torch", {}, 0),
        ("another rank says it", TRAINS, {"RANK": "1"}, 0),
        ("switched off", TRAINS, {"DS_KFAC": "0"}, 0),
        ("its own error says enough", TRAINS + "raise ValueError('mine')", {}, 1),
    ],
    ids=lambda case: case[0],
)
def test_others_are_not(case, tmp_path):
    _, code, variables, status = case
    assert ASKED not in said(tmp_path, code, status=status, **variables)


def test_deepspeed_that_is_imported_and_not_used_is_told_of(tmp_path):
    text = said(tmp_path, "import deepspeed\n" + TRAINS)
    assert text.count(ASKED) == 1 and "deepspeed.initialize was never called" in text


SET = "import os; os.environ['DS_KFAC'] = '1'\n"


@pytest.mark.parametrize(
    "first, said_why",
    [
        ("", "deepspeed was never imported"),
        ("import deepspeed\n", "when deepspeed had been imported already"),
        ("import ds_kfac\n", "deepspeed.initialize was never called"),
    ],
)
def test_a_script_that_sets_the_variable_itself_is_told_of(first, said_why, tmp_path):
    text = said(tmp_path, first + SET + TRAINS, DS_KFAC="")
    assert text.count(ASKED) == 1 and said_why in text, text


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


def test_an_engine_whose_config_does_not_name_it_is_told_of(tmp_path, monkeypatch):
    """Each is a process that ends, forked from one that has imported DeepSpeed."""
    monkeypatch.chdir(tmp_path)
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert ASKED not in said(tmp_path, ENGINES, **single, MASTER_PORT=str(free_port()))
    for name in CONFIGS:
        text = (tmp_path / name).read_text()
        told = name == "AdamW"
        assert (ASKED in text) == told and (
            "the DeepSpeed config names it nowhere" in text
        ) == told, (name, text)


@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"), reason="needs ds_kfac[integrations]"
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_without_deepspeed_is_told_of_once(ranks, tmp_path):
    port = ["--main_process_port", str(free_port())] if ranks > 1 else []
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks), *port]
    text = said(tmp_path, ACCELERATED, *launcher)
    assert text.count(ASKED) == 1, text
