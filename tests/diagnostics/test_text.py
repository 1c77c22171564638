"""Lines that fit a terminal."""

import textwrap

import pytest

from ds_kfac.diagnostics.text import fitted

TEXT = (
    "a head\n  a line of the report that is longer than others, by far\n\n  name   type\n  "
    "short  Linear"
)


@pytest.mark.parametrize("width", [20, 40, 1000])
def test_long_lines_are_broken_and_indented(width):
    lines = fitted(TEXT, width).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split()), "nothing is lost"
    broken = [line for line in lines if line.startswith("      ")]
    assert bool(broken) == (width < 1000) and lines[-1] == "  short  Linear"


def test_a_word_that_is_longer_stays_whole():
    path = "/a/" + "b" * 60
    assert path in fitted(f"file {path}", 30).split()


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, fitted(textwrap.fill("word " * 90, 400)).split("\n"))) <= 50
    monkeypatch.setenv("COLUMNS", "3")
    assert max(map(len, fitted("word " * 90).split("\n"))) > 30, "a terminal of no width"
