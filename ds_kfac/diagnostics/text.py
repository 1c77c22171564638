"""Lines, tables and numbers for a terminal."""

import re
import shutil
import textwrap
from collections.abc import Sequence

WIDTH = 160
"""Columns if there is no terminal, as in a file or a launcher's log."""
NARROWEST = 40
Row = tuple[str, ...]


def fitted(text: str, width: int | None = None) -> str:
    """Break long lines at spaces, and indent the continuation by 4 more; a longer word stays whole.
    ``width``: columns; None: the terminal's, or COLUMNS of the environment, or :data:`WIDTH`."""
    if width is None:
        width = max(NARROWEST, shutil.get_terminal_size(fallback=(WIDTH, 24)).columns)
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line.lstrip(),
            width,
            initial_indent=indent,
            subsequent_indent=indent + 4 * " ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def columns(rows: Sequence[Row], *, right: bool = False) -> list[str]:
    """Indented lines; ``right``: all but the first column are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<", *((">" if right else "<") * (len(widths) - 1))]
    cells = (
        [f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)]
        for row in rows
    )
    return [f"  {'  '.join(row).rstrip()}" for row in cells]


def number(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            digits = ".3g" if abs(value) < 999.5 * size else ".0f"
            return f"{value / size:{digits}} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def folded(rows: Sequence[Row]) -> list[Row]:
    """Rows whose names differ in numbers only, all else equal, as one: ``blocks.[0-31].mlp.up x
    32``."""
    together: dict[Row, list[list[int]]] = {}
    for name, *cells in rows:
        numbers = [int(number) for number in re.findall(r"\d+", name)]
        together.setdefault((re.sub(r"\d+", "#", name), *cells), []).append(numbers)
    return [
        (_name(pattern, found) or "(model)", *cells)
        for (pattern, *cells), found in together.items()
    ]


def _name(pattern: str, found: Sequence[Sequence[int]]) -> str:
    ranges = [(min(column), max(column)) for column in zip(*found, strict=True)]
    texts = iter(str(low) if low == high else f"[{low}-{high}]" for low, high in ranges)
    return re.sub("#", lambda _: next(texts), pattern) + (
        f" x {len(found)}" if len(found) > 1 else ""
    )
