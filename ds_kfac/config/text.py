"""Text for a terminal: lines that fit its width, and a file that is not there. Imports neither torch nor DeepSpeed."""

import os
import shutil
import textwrap

WIDTH = 100
"""Of lines where no terminal says another one, such as in a file or a launcher's log."""
NARROWEST = 40


def fitted(text: str, width: int | None = None) -> str:
    """Break long lines at spaces; what follows is indented by 4 more than the line. A word that is longer stays whole.

    Args:
        width: columns; None: of the terminal, or of COLUMNS in the environment, or :data:`WIDTH`.
    """
    if width is None:
        width = max(NARROWEST, shutil.get_terminal_size(fallback=(WIDTH, 24)).columns)
    found: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            found.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        found += textwrap.wrap(line.lstrip(), width, initial_indent=indent, subsequent_indent=indent + 4 * " ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return "\n".join(found)


def must_exist(option: str, path: str | os.PathLike, what: str) -> None:
    """Raise ValueError if there is nothing at a path.

    Args:
        option: of the command, as it was written before the path.
        what: the option takes.
    """
    if not os.path.exists(path):
        raise ValueError(f"{option}{path}: no such file or folder in {os.getcwd()}; give {what}")
