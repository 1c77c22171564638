"""The tables in docs/estimator.md and docs/notes/estimates.md are what their commands print.
``python -m tests.estimate.test_docs`` writes them."""

import contextlib
import io
import os
import re

import pytest

from ds_kfac.__main__ import main
from tests.ranks import ROOT

PAGES = (ROOT / "docs/estimator.md", ROOT / "docs/notes/estimates.md")
BLOCK = re.compile(r"```(table|console)\n\$ python -m ds_kfac (.*)\n((?:.*\n)*?)```\n")


def printed(kind: str, command: str) -> str:
    """What a command prints, or of it the table of strategies."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(command.split()) == 0
    text = output.getvalue()
    return text if kind == "console" else re.search(r"^  strategy .*\n(?:.+\n)*", text, re.M)[0]


BLOCKS = list(
    dict.fromkeys(match.groups() for page in PAGES for match in BLOCK.finditer(page.read_text()))
)
"""(kind, command, what the page shows), once where both pages show it."""


@pytest.mark.parametrize(("kind", "command", "shown"), BLOCKS)
def test_a_table_is_what_its_command_prints(kind, command, shown, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert printed(kind, command) == shown, (
        "python -m tests.estimate.test_docs writes the tables anew"
    )


def test_every_named_model_has_a_table():
    commands = " ".join(command for _, command, _ in BLOCKS)
    for model in ("gpt2_xl", "llama_7b", "bert_large", "gpt_oss_20b", "qwen3_30b_a3b"):
        assert f"--model benchmarks.models:{model} --world 64" in commands


def write() -> None:
    """From the root of the repository."""
    os.environ["COLUMNS"] = "200"  # of a page, whose tables are wide

    def block(found: re.Match) -> str:
        kind, command, _ = found.groups()
        return f"```{kind}\n$ python -m ds_kfac {command}\n{printed(kind, command)}```\n"

    for page in PAGES:
        page.write_text(BLOCK.sub(block, page.read_text()))


if __name__ == "__main__":
    write()
