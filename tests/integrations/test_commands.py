"""``python -m ds_kfac``: what is misspelt or missing is said at once, and lines fit the
terminal."""

import os

import pytest

from ds_kfac.__main__ import main
from ds_kfac.integrations.launcher import wants_help
from tests.programs import python
from tests.ranks import ROOT

HEAVY = {"torch", "deepspeed", "transformers"}
SCRIPT = "import sys\nfrom ds_kfac.__main__ import main\nsys.exit(main())\n"


@pytest.mark.parametrize(
    ("word", "told"),
    [("chek", "did you mean check?"), ("report", "mean doctor?"), ("x", "commands: estimate, ")],
)
def test_a_misspelt_command_is_told_the_nearest(capsys, word, told):
    assert main([word, "--config", "a.json"]) == 2
    assert told in capsys.readouterr().err


def run(arguments: str, folder, *, script: bool = True, **options) -> tuple:
    """The process, and which heavy packages it has imported. ``script``: as the console script does
    it."""
    (folder / "ds_kfac").write_text(SCRIPT)
    start = ["ds_kfac"] if script else ["-m", "ds_kfac"]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = ["-X", "importtime", *start, *arguments.split()]
    done = python(*command, folder=folder, path=path, **options)
    lines = done.stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    done.stderr = "\n".join(line for line in lines if not line.startswith("import time:"))
    return done, names & HEAVY


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("check --config none.json --model os:getcwd", "--config none.json: no such file"),
        ("check --config a.json --model nowhere.models:make", "no module nowhere"),
        ("factors --model hf:. --data none.txt --out x", "--data none.txt: no such file"),
        ("convert none --to gptq --out x", "factors none: no such file or folder"),
        ("run --num_gpus 2 none.py", "none.py: no such file"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_imported(tmp_path, arguments, told):
    (tmp_path / "a.json").write_text("{}")
    script = arguments.startswith("run")  # the others by python -m
    done, heavy = run(arguments, tmp_path, script=script, status=1, COLUMNS="400")
    assert told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not heavy


def test_run_shows_its_own_help_but_not_in_place_of_the_scripts(tmp_path):
    done, heavy = run("run --num_gpus 2 -h", tmp_path)
    assert done.stdout.startswith("usage: ds_kfac run [deepspeed launcher arguments]")
    assert not heavy
    scripts = ("train.py --help", "--module package.train -h 8", f"--no_python {__file__} --help")
    assert not any(wants_help(arguments.split()) for arguments in scripts)
    own = ("--num_gpus 1 --help train.py", "--module -h")
    assert all(wants_help(arguments.split()) for arguments in own)


def test_a_module_of_this_folder_is_found_by_the_script(tmp_path):
    """As ``python -m`` finds it."""
    model = "    return nn.Sequential(nn.Linear(8, 8))\n"
    (tmp_path / "own.py").write_text(f"from torch import nn\n\ndef make():\n{model}")
    (tmp_path / "a.json").write_text('{"optimizer": {"type": "KFACAdamW"}}')
    done, _ = run("check --config a.json --model own:make", tmp_path, COLUMNS="70")
    assert "a.json fits own:make" in done.stdout and max(map(len, done.stdout.splitlines())) <= 70


USER = """
import ds_kfac
from torch import nn

model = nn.Linear(3, 3)
engine, optimizer, loader, scheduler = ds_kfac.initialize(
    model=model, model_parameters=model.parameters(), config={"optimizer": {"type": "KFACAdamW"}}
)
attachment = ds_kfac.attach(engine)
if attachment is not None:
    print(attachment.report, attachment.counters()["steps"])
own = ds_kfac.KFACAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
ds_kfac.initialize(model=model, optimizer=own, config="ds_config.json")
"""
WRONG = "import ds_kfac\n\nds_kfac.initialize(modl=3)\nds_kfac.initialise()\n"


def test_a_users_script_passes_mypy(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = ["-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "user.py", "wrong.py"]
    done = python(*command, folder=tmp_path, status=1, MYPYPATH=str(ROOT))
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in errors] == ["wrong.py"] * 2, done.stdout
    assert 'argument "modl" for "initialize"' in errors[0] and '"initialise"' in errors[1]
