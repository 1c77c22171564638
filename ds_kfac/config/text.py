"""Text for a terminal: lines that fit its width, errors of missing files. Imports neither torch nor DeepSpeed."""

import os
import shutil
import textwrap

WIDTH = 160
"""Columns if there is no terminal, as in a file or a launcher's log."""
NARROWEST = 40


def fitted(text: str, width: int | None = None) -> str:
    """Break long lines at spaces, and indent the continuation by 4 more; a longer word stays whole. ``width``: columns;
    None: the terminal's, or COLUMNS of the environment, or :data:`WIDTH`."""
    if width is None:
        width = max(NARROWEST, shutil.get_terminal_size(fallback=(WIDTH, 24)).columns)
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line.lstrip(), width, initial_indent=indent, subsequent_indent=indent + 4 * " ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines)


def must_exist(option: str, path: str | os.PathLike, what: str) -> None:
    """Raise ValueError if there is nothing at a path. ``option``: text before the path; ``what``: what it takes."""
    if not os.path.exists(path):
        raise ValueError(f"{option}{path}: no such file or folder in {os.getcwd()}; give {what}")
