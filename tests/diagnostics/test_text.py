"""Lines that fit a terminal."""

import pytest

from ds_kfac.diagnostics.text import fitted

TEXT = (
    "a head\n  a line of the report that is longer than others, by far\n\n  name   type\n  "
    "short  Linear"
)


@pytest.mark.parametrize("width", [20, 1000])
def test_long_lines_are_broken_and_indented(width):
    lines = fitted(TEXT, width).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split()), "nothing is lost"
    assert any(line.startswith("      ") for line in lines) == (width < 1000)


def test_a_longer_word_stays_whole_and_the_width_is_the_terminals(monkeypatch):
    path = "/a/" + "b" * 60
    assert path in fitted(f"file {path}", 30).split()
    for columns in ("50", "3"):  # a terminal of no width
        monkeypatch.setenv("COLUMNS", columns)
        assert 30 < max(map(len, fitted("word " * 90).split("\n"))) <= 50
