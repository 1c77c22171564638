"""Lines, tables and numbers for a terminal."""

import re
import shutil
import textwrap
from collections.abc import Sequence

WIDTH = 160
"""Number of columns if the output is not a terminal, but for example a launcher's log."""
NARROWEST = 40
Row = tuple[str, ...]


def fitted(text: str, width: int | None = None) -> str:
    """Break long lines at spaces, and indent continuation lines by 4 more columns. A word that is
    longer than a line is not broken.

    Args:
        width: number of columns. If None, it is the value of the environment variable COLUMNS, else
            the terminal's width, else :data:`WIDTH`.
    """
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
    """Return a table's rows as indented lines.

    Args:
        right: whether to align all columns except the first at the right, as is usual for numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<", *((">" if right else "<") * (len(widths) - 1))]
    cells = (
        [f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)]
        for row in rows
    )
    return [f"  {'  '.join(row).rstrip()}" for row in cells]


def number(value: float, unit: str) -> str:
    """Return a number with three digits, a decimal prefix and its unit, such as ``1.25 MB``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            digits = ".3g" if abs(value) < 999.5 * size else ".0f"
            return f"{value / size:{digits}} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def folded(rows: Sequence[Row]) -> list[Row]:
    """Merge rows that differ only in the numbers inside their names into one row, with a name such
    as ``blocks.[0-31].mlp.up x 32``."""
    numbers_of: dict[Row, list[list[int]]] = {}
    for name, *cells in rows:
        numbers = [int(number) for number in re.findall(r"\d+", name)]
        pattern = re.sub(r"\d+", "#", name)
        numbers_of.setdefault((pattern, *cells), []).append(numbers)
    return [
        (_folded_name(pattern, numbers) or "(model)", *cells)
        for (pattern, *cells), numbers in numbers_of.items()
    ]


def _folded_name(pattern: str, numbers: Sequence[Sequence[int]]) -> str:
    """Return the pattern with each ``#`` replaced by the range of numbers that rows have there."""
    texts = []
    for place in zip(*numbers, strict=True):
        low = min(place)
        high = max(place)
        texts.append(str(low) if low == high else f"[{low}-{high}]")
    replacements = iter(texts)
    name = re.sub("#", lambda _: next(replacements), pattern)
    return f"{name} x {len(numbers)}" if len(numbers) > 1 else name
