"""K-FAC was asked for and no engine got it: said once, at the end, by rank 0. And what DeepSpeed
alone does not read or know is said as the engine is made."""

import os
import re
from pathlib import Path

import pytest

from ds_kfac.engine import entry
from tests.examples.runs import one_rank
from tests.programs import python
from tests.ranks import ROOT

ASKED = "K-FAC was asked for, but this program has trained without it"
TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
"""
SET = "import os; os.environ['DS_KFAC'] = '1'\n"


def said(folder: Path, code: str, *, status: int = 0, **variables: str) -> str:
    """What a program writes to standard error, where ds_kfac.pth is at work."""
    (folder / "sitecustomize.py").write_text((ROOT / "ds_kfac.pth").read_text())
    (folder / "train.py").write_text(code)
    path, variables = f"{folder}{os.pathsep}{ROOT}", {"DS_KFAC": "1"} | variables
    return python("train.py", folder=folder, path=path, status=status, **variables).stderr


NO_CALL = "deepspeed.initialize was never called"


@pytest.mark.parametrize(
    ("code", "variables", "why"),
    [
        (TRAINS, {}, "deepspeed was never imported.*--use_deepspeed"),
        ("import deepspeed\n" + TRAINS, {}, NO_CALL),
        ("import deepspeed\n" + SET + TRAINS, {"DS_KFAC": ""}, "had been imported already"),
        pytest.param("import torch", {}, "", id="it does not train"),
        pytest.param(TRAINS, {"RANK": "1"}, "", id="another rank says it"),
        pytest.param(TRAINS, {"DS_KFAC": "0"}, "", id="switched off"),
        pytest.param(TRAINS + "raise ValueError('mine')", {}, "", id="its own error says enough"),
    ],
)
def test_a_program_that_trained_without_it_is_told_of_and_why(code, variables, why, tmp_path):
    text = said(tmp_path, code, status=int("raise" in code), **variables)
    assert text.count(ASKED) == bool(why) and re.search(why, text, re.S), text


@pytest.mark.parametrize(
    ("called", "word", "on"),
    [(None, "1", True), (None, "", False), (False, "1", False), (True, "", True)],
)
def test_the_last_call_decides_and_without_one_the_variable(called, word, on, monkeypatch):
    """Also where a script sets it after it has imported ds_kfac."""
    monkeypatch.setattr(entry, "_enabled", called)
    monkeypatch.setattr(entry, "_unattached", NO_CALL)
    monkeypatch.setenv("DS_KFAC", word)
    assert entry.enabled() == on and entry.unattached() == (NO_CALL if on else None)


OFF = {"enabled": False}
WARNS, RUN, FAILS = "ds_kfac: WARNING", "python -m ds_kfac run", "Traceback (most recent"
NOT_NAMED = f"{ASKED}: the DeepSpeed config does not name K-FAC"
UNREAD = 'the config has a "kfac" block, which DeepSpeed alone does not read'
NOT_ENABLED = "ds_kfac.enable() was not called"
MEANT = 'did you mean "KFACAdamW"?'
PARTS = {WARNS, RUN, FAILS, NOT_NAMED, UNREAD, NOT_ENABLED, MEANT}
STARTS = [("1", ""), ("", ""), ("", "import ds_kfac")]
SAID = [
    (*STARTS[0], "AdamW", None, {WARNS, NOT_NAMED}),
    (*STARTS[0], "KFACAdamW", None, set()),
    (*STARTS[0], "AdamW", {}, set()),
    (*STARTS[0], "AdamW", OFF, set()),
    (*STARTS[1], "SGD", {}, {WARNS, RUN, UNREAD}),
    (*STARTS[1], "SGD", None, set()),
    (*STARTS[1], "SGD", OFF, set()),
    (*STARTS[1], "KFACAdamW", None, {RUN, FAILS}),
    (*STARTS[1], "K-FAC", None, {RUN, FAILS, MEANT}),
    (*STARTS[1], "Adamm", None, {FAILS}),
    (*STARTS[2], "SGD", {}, {WARNS, RUN, NOT_ENABLED}),
    (*STARTS[2], "K-FAC", None, {FAILS, MEANT}),
]
"""DS_KFAC, what the program imports, the engine's optimizer and "kfac" block, what is said."""
ENGINES = """
import os, sys, deepspeed, torch, torch._dynamo
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
{imports}
for number, (name, block) in enumerate({configs}):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.dup2(os.open(str(number), os.O_WRONLY | os.O_CREAT), 2)
    model, params = torch.nn.Linear(4, 4), {{"lr": 1e-3}}
    params |= {{"torch_adam": True}} if "Adam" in name else {{}}
    config = {{"optimizer": {{"type": name, "params": params}}, "train_batch_size": 1}}
    config |= {{"kfac": block}} if block is not None else {{}}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sys.exit()
"""


@pytest.mark.parametrize(("word", "imports"), STARTS)
def test_what_is_not_read_known_or_named_is_said(word, imports, tmp_path):
    """Each engine is that of a process that ends, forked from one that has imported DeepSpeed."""
    cases = [row[2:] for row in SAID if row[:2] == (word, imports)]
    code = ENGINES.format(imports=imports, configs=[case[:2] for case in cases])
    assert ASKED not in said(tmp_path, code, DS_KFAC=word, **one_rank())
    for number, (*config, told) in enumerate(cases):
        text = (tmp_path / str(number)).read_text()
        assert {part for part in PARTS if part in text} == told, (config, text)
        assert all(text.count(part) < 2 for part in (ASKED, UNREAD, NOT_ENABLED, MEANT)), text
