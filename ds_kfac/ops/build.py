"""Native libraries, compiled at first use and kept: one per set of sources and flags.

A library is found next to the package (built ahead of time) or in the cache, else compiled under a lock. The lock is
the kernel's and ends with its process; a process that waits too long compiles for itself. Libraries appear whole: they
are renamed into place. Uses the standard library alone, for setup.py.
"""

import fcntl
import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("DeepSpeed")
PACKAGE = Path(__file__).parent.parent
BUILT = PACKAGE / "ops" / "built"
"""Where ``DS_KFAC_BUILD_OPS=1 pip install`` puts libraries."""
COMPILE_SECONDS = 300
LOCK_SECONDS = 120


class BuildError(RuntimeError):
    """Why there is no library; one line for people."""


def find_sources(part: str) -> Path:
    """The folder ``csrc/<part>``: in an installed package, or next to it in a checkout."""
    for root in (PACKAGE, PACKAGE.parent):
        if (root / "csrc" / part).is_dir():
            return root / "csrc" / part
    raise BuildError(f"its sources, csrc/{part}, are not installed")


def folder() -> Path:
    """The cache: ``TORCH_EXTENSIONS_DIR``, as DeepSpeed's ops, or ``~/.cache``."""
    extensions, cache = os.environ.get("TORCH_EXTENSIONS_DIR"), os.environ.get("XDG_CACHE_HOME")
    return (Path(extensions) if extensions else Path(cache) if cache else Path.home() / ".cache") / "ds_kfac"


def library_name(part: str, flags: Sequence[str], sources: Path | None = None) -> str:
    """A file name made of sources and flags: another one where anything is another.

    Raises:
        BuildError: there are no sources.
    """
    identity = hashlib.sha256("\0".join([part, *flags]).encode())
    for file in _files(part, sources):
        identity.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{part}-{identity.hexdigest()[:16]}.so"


def _files(part: str, sources: Path | None) -> list[Path]:
    folder = sources or find_sources(part)
    return sorted(file for file in folder.iterdir() if file.suffix in (".h", ".cu"))


def find(library: str, places: Sequence[Path]) -> Path | None:
    return next((place / library for place in places if (place / library).exists()), None)


def build(
    part: str,
    compiler: Callable[[], str],
    flags: Sequence[str],
    *,
    sources: Path | None = None,
    into: Path | None = None,
) -> Path:
    """The shared library of all files of ``csrc/<part>`` that are no headers; compiled if there is none.

    Args:
        compiler: finds one; asked only if it is needed, so that what was built ahead of time runs without.
        sources: another folder than ``csrc/<part>``.
        into: the folder to find or put it in; None: find it in :data:`BUILT` or find or put it in :func:`folder`.

    Raises:
        BuildError: it cannot be compiled.
    """
    library = library_name(part, flags, sources)
    places = [into] if into else [BUILT, folder()]
    found = find(library, places)
    if found is not None:
        return found
    path = places[-1] / library
    files = [str(file) for file in _files(part, sources) if file.suffix != ".h"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                if into is None:
                    LOGGER.info(f"ds_kfac: compiling csrc/{part}, once; ahead of time: DS_KFAC_BUILD_OPS=1 pip install")
                _compile([compiler(), *flags, *files], path)
    except OSError as problem:
        raise BuildError(f"cannot write to {path.parent}: {problem}") from problem
    return path


def _compile(command: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.stem) as temporary:
        whole = Path(temporary) / path.name
        try:
            done = subprocess.run(
                [*command, "-o", str(whole)], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise BuildError(f"{command[0]} does not run: {problem}") from problem
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
            raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'status {done.returncode}'}")
        os.replace(whole, path)


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Alone with ``path``, or after ``seconds`` (None: ``LOCK_SECONDS``), or where the file system has no locks, not
    alone."""
    with path.open("w") as file:
        deadline = time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
