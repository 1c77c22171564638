"""Text in columns."""

from collections.abc import Sequence


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
