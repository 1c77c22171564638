"""Python programs in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OURS = ("DS_KFAC", "RANK", "LOCAL_RANK")
"""Variables that a program does not inherit from the tests."""


def python(
    *arguments: str,
    folder: Path,
    executable: str = sys.executable,
    path: str = "",
    status: int | None = 0,
    without: Sequence[str] = OURS,
    **variables: str,
) -> subprocess.CompletedProcess:
    """Run Python in a folder with PYTHONPATH ``path`` and more variables, ``without`` some of this
    process. It ends with ``status``, unless that is None."""
    kept = {key: value for key, value in os.environ.items() if key not in without}
    done = subprocess.run(
        [executable, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done
