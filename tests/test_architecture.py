"""The rules of the package that a machine can check: imports go down, without circles, and bring
little; all is said by one logger."""

import ast
import logging
import logging.config
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from ds_kfac import __all__ as names
from ds_kfac.config.keys import OpsConfig, PreconditionerConfig
from ds_kfac.curvature.methods import METHODS
from ds_kfac.log import logger, say, warn
from ds_kfac.ops.dispatch import BACKENDS
from tests.programs import python
from tests.ranks import ROOT

PACKAGE = Path(__file__).parent.parent / "ds_kfac"
FLOORS = (
    "ops",
    "curvature",
    "schedule",
    "model",
    "update",
    "assignment",
    "comm",
    "zero",
    "lr_schedulers",
    "config",
    "plan",
    "directions",
    "step",
    "diagnostics",
    "checkpoint",
    "factors",
    "engine",
    "estimate",
    "integrations",
)
"""Folders, lowest first: a file imports files of its own folder and of those before it."""
ANYWHERE = {"log", "metrics"}
WITHOUT_RANKS = FLOORS[: FLOORS.index("comm")]
FOREIGN = r"(deepspeed|torch\.distributed)\b"
FILES = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
INSIDE = {name: path for name, path in FILES.items() if len(name.parts) > 1}


@cache
def imports(path: Path) -> set[str]:
    """Full names of what a file imports; ``from package import module`` counts as the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def our_files(path: Path) -> set[Path]:
    """The files of the package that a file imports."""
    found = {
        Path(*target.split(".")[1:]) for target in imports(path) if target.startswith("ds_kfac.")
    }
    return {
        file
        for name in found
        for file in (name.with_suffix(".py"), name / "__init__.py")
        if file in FILES
    }


def circle(arrows: Mapping[Any, Iterable[Any]]) -> list[str]:
    """What is left when everything that imports nothing of what is left has been taken away:
    nothing, or circles."""
    left = {name: set(targets) - {name} for name, targets in arrows.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(map(str, left))


def test_every_folder_has_a_floor_and_imports_go_down():
    assert {name.parts[0] for name in INSIDE} == set(FLOORS)
    for name, path in INSIDE.items():
        floor = FLOORS.index(name.parts[0])
        for target in imports(path):
            folder = target.removeprefix("ds_kfac.").split(".")[0]
            if target.startswith("ds_kfac.") and folder not in ANYWHERE:
                assert FLOORS.index(folder) <= floor, f"{name} imports {target}, above it"


def test_no_circle_of_files_or_folders():
    arrows = {name: our_files(path) for name, path in FILES.items()}
    assert circle(arrows) == []
    folders: dict[str, set[str]] = {}
    for name in INSIDE:
        folders.setdefault(name.parts[0], set()).update(target.parts[0] for target in arrows[name])
    assert circle(folders) == []


def test_the_mathematics_knows_neither_deepspeed_nor_ranks():
    """Nor does a file that it imports, or one that this imports."""
    left = [name for name in INSIDE if name.parts[0] in WITHOUT_RANKS]
    reached = set(left)
    while left:
        file = left.pop()
        foreign = [t for t in imports(FILES[file]) if re.match(FOREIGN, t)]
        assert not foreign, f"the mathematics reaches {file}, which imports {foreign}"
        new = our_files(FILES[file]) - reached
        reached |= new
        left += new


def test_reference_stands_alone():
    names = {target.split(".")[0] for target in imports(PACKAGE / "reference.py")}
    assert names == {"torch", "typing"}


HEAVY = {"torch", "deepspeed", "numpy", "transformers", "matplotlib"}


@pytest.mark.parametrize("command", ["--help", "schema", "config", "plot --help"])
def test_commands_about_keys_import_nothing_heavy(command):
    importing = ["-X", "importtime", "-m", "ds_kfac", *command.split()]
    run = python(*importing, folder=ROOT, path=str(ROOT))
    imported = set(re.findall(r"\| +(\w+)$", run.stderr, re.MULTILINE))
    assert "ds_kfac" in imported and not imported & HEAVY, imported & HEAVY
    assert run.stdout


def test_the_import_brings_nothing_beside_what_deepspeed_brings():
    """Not even parts of torch: torch._dynamo takes more than a second."""
    code = (
        "import sys, deepspeed; before = {*sys.modules, *sys.stdlib_module_names}\n"
        "import ds_kfac; print({name.partition('.')[0] for name in {*sys.modules} - before})"
    )
    run = python("-c", code, folder=ROOT, path=str(ROOT))
    assert set(re.findall(r"'(\w+)'", run.stdout.splitlines()[-1])) <= {"ds_kfac", "pydantic"}


def test_a_commands_model_may_use_all_of_ds_kfac():
    """There it is imported when it is asked for."""
    code = (
        "import sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-mds_kfac']\n"
        "import ds_kfac; assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules\n"
        f"print([getattr(ds_kfac, name) is not None for name in {names!r}].count(True))\n"
        "import deepspeed; assert deepspeed.initialize.__wrapped__\n"
        "try: ds_kfac.nothing\n"
        "except AttributeError as error: print(error)"
    )
    run = python("-c", code, folder=ROOT, path=str(ROOT))
    error = "module 'ds_kfac' has no attribute 'nothing'"
    assert run.stdout.splitlines()[-2:] == [str(len(names)), error]


def test_the_names_of_methods_and_backends_are_those_of_their_tables():
    """The config knows them without torch."""
    method, backend = PreconditionerConfig.model_fields["method"], OpsConfig.model_fields["backend"]
    assert get_args(method.annotation) == tuple(METHODS)
    assert get_args(get_args(backend.annotation)[0]) == tuple(BACKENDS)


PRINTS = {"__main__.py", "estimate/command.py", "factors/command.py", "ops/build.py", "log.py"}
"""Files that print results of commands, or what pip shows while it builds."""


def test_rank_0_says_it_once_whatever_the_root_logger_prints(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])  # as basicConfig does
    say("attached")
    warn("a thing")
    monkeypatch.setenv("RANK", "1")
    say("not by rank 1")
    warn("but this one", here=True)
    assert capsys.readouterr().err.splitlines() == [
        "attached",
        "ds_kfac: WARNING: a thing",
        "ds_kfac: WARNING: but this one",
    ]


def test_it_is_said_although_a_framework_disables_loggers_and_not_if_the_program_asks_for_less(
    capsys,
):
    logging.config.dictConfig({"version": 1})
    assert logger.disabled, "what existed before"
    warn("heard")
    logger.setLevel("ERROR")
    try:
        warn("not heard")
    finally:
        logger.setLevel("INFO")
    assert capsys.readouterr().err == "ds_kfac: WARNING: heard\n"


def test_no_file_has_another_way_of_saying_things():
    for path in PACKAGE.rglob("*.py"):
        name, nodes = path.relative_to(PACKAGE).as_posix(), [*ast.walk(ast.parse(path.read_text()))]
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        imported = {
            alias.name
            for node in imports
            for alias in node.names
            if node.module == "deepspeed.utils"
        }
        others = {"warnings.warn", "log_dist"}
        others |= set() if name in PRINTS else {"print", "logging.getLogger"}
        assert not called & others and not imported & {"logger", "log_dist"}, name
