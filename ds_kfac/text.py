"""Text in columns, numbers for people, and standard output for what a command was asked for."""

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

WIDTH = 120
UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def columns(rows: Sequence[tuple[str, ...]], *, right: bool = False) -> list[str]:
    """Indented lines; ``right``: all but the first column are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if right and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [f"  {line.rstrip()}" for line in lines]


def wrapped(text: str) -> list[str]:
    """A long sentence as lines, indented as columns are."""
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def number(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for prefix, size in UNITS:
        if abs(value) >= 0.9995 * size:
            return (
                f"{value / size:.3g} {prefix}{unit}"
                if abs(value) < 999.5 * size
                else f"{value / size:.0f} {prefix}{unit}"
            )
    return f"{value:.3g} {unit}"


@contextmanager
def only_for_data() -> Iterator[None]:
    """What is written to standard output meanwhile, by Python, C or children, goes to standard error: DeepSpeed logs to
    it as soon as it is imported, and so do compilers and models, but ``python -m ds_kfac schema > file`` needs it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def is_command() -> bool:
    """Whether this package is being imported for ``python -m ds_kfac``."""
    return sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __package__
