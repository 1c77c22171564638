"""Tolerances come from tests/close.py: no other comparison, and no small number that nobody
explains."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
COMPARISONS = {"allclose", "approx", "assert_allclose", "assert_almost_equal", "isclose"}
COMPARISONS |= {"assert_close"}
"""Of torch, numpy, pytest and math: their defaults were chosen for nobody's sums."""
TOLERANCES = {"abs_tol", "atol", "rel_tol", "rtol"}
SMALL = re.compile(r"[<>]=? *(\d(\.\d*)?e-\d|2\*\*-\d|0\.0[01]).*[^:]$")
"""A comparison with a number of 0.01 or less, but for conditions: larger ones say what is true of
the mathematics. It is explained by a comment, or by what a failing assert says in words."""


def complaints(source: str) -> list[str]:
    """Line and reason of everything that :mod:`tests.close` should say."""
    found, lines = [], source.splitlines()
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, "attr", getattr(node, "id", None))]
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        if COMPARISONS.intersection(names):
            found.append(f"{node.lineno}: {names}: use close, exact or near of tests/close.py")
        if isinstance(node, ast.keyword) and node.arg in TOLERANCES:
            found.append(f"{node.value.lineno}: {node.arg}: state terms, see tests/close.py")
    for number, line in enumerate(lines):
        explained = "#" in "".join(lines[max(number - 1, 0) : number + 1]) or ', "' in line
        if SMALL.search(line) and not explained:
            found.append(f"{number + 1}: a small number: use close, a name or a comment")
    return found


def test_results_are_compared_by_terms_or_with_a_reason():
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        told = complaints(path.read_text())
        if told and path.name != "close.py":
            found[str(path.relative_to(TESTS))] = told
    assert found == {}, found
