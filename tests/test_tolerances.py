"""Tolerances come from tests/close.py: no other comparison, and no small number that nobody
explains."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
COMPARISONS = {
    "allclose",
    "approx",
    "assert_allclose",
    "assert_almost_equal",
    "assert_close",
    "isclose",
}
"""Of torch, numpy, pytest and math: their defaults were chosen for nobody's sums."""
TOLERANCES = {"abs_tol", "atol", "rel_tol", "rtol"}
SMALL = 0.01
"""A bound of so much or less is a tolerance; larger ones say what is true of the mathematics."""


def small(node: ast.AST) -> bool:
    """1e-5, 2**-7, 1e-4 * x: a number of ours that is :data:`SMALL`, but for zero."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return isinstance(node.right, ast.UnaryOp) and isinstance(node.right.op, ast.USub)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        return small(node.left) or small(node.right)
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value <= SMALL
    )


def bounds(node: ast.Compare) -> list[ast.expr]:
    """What is compared by size."""
    sides = [node.left, *node.comparators]
    sized = [isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops]
    return [side for i, side in enumerate(sides) if any(sized[max(i - 1, 0) : i + 1])]


def explained(statement: ast.stmt, lines: list[str]) -> bool:
    """By a comment in the statement or above it, or by what a failing assert says in words."""
    if isinstance(statement, ast.Assert) and isinstance(statement.msg, ast.Constant):
        return True
    return any("#" in line for line in lines[max(statement.lineno - 2, 0) : statement.end_lineno])


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
        if isinstance(node, ast.Assert | ast.Assign | ast.Return | ast.Expr):
            compares = [part for part in ast.walk(node) if isinstance(part, ast.Compare)]
            sides = [side for compare in compares for side in bounds(compare)]
            if any(map(small, sides)) and not explained(node, lines):
                found.append(f"{node.lineno}: a small number: use close, a name or a comment")
    return found


def test_results_are_compared_by_terms_or_with_a_reason():
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        told = complaints(path.read_text())
        if told and path.name != "close.py":
            found[str(path.relative_to(TESTS))] = told
    assert found == {}, found
