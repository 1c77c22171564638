"""All that ds_kfac says goes by one logger to standard error, whatever frameworks do to theirs."""

import ast
import logging
import logging.config
from pathlib import Path

import ds_kfac
from ds_kfac.log import logger, say, warn

PACKAGE = Path(ds_kfac.__file__).parent
PRINTS = {
    "__main__.py",
    "estimate/command.py",
    "factors/command.py",
    "ops/build.py",
    "factors/progress.py",
    "log.py",
}
"""Files that print results of commands, a bar, or what pip shows while it builds."""


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
