"""The library of csrc/cuda: compiled by nvcc ahead of time or at first use, and kept, one per set of sources and flags.

It is found next to the package (built ahead of time) or in the cache, else compiled under a lock, which ends with its
process; who waits too long compiles for itself. Libraries appear whole: they are renamed into place. Of the standard
library alone: setup.py must run where neither torch nor DeepSpeed is installed.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("DeepSpeed")
PACKAGE = Path(__file__).parent.parent
BUILT = PACKAGE / "ops" / "built"
"""Where ``DS_KFAC_BUILD_OPS=1 pip install`` puts libraries."""
COMPILE_SECONDS = 300
LOCK_SECONDS = 120
ARCHITECTURES = ("80", "90a", "100", "120")
"""A100, H100 and H200, B200, RTX 50; others compile for themselves, just in time."""
NVCC = "/usr/local/cuda/bin/nvcc"


class BuildError(RuntimeError):
    """Why there is no library; one line for people."""


def source_folder() -> Path:
    """``csrc/cuda``: in an installed package, or next to it in a checkout."""
    for root in (PACKAGE, PACKAGE.parent):
        if (root / "csrc" / "cuda").is_dir():
            return root / "csrc" / "cuda"
    raise BuildError("its sources, csrc/cuda, are not installed")


def sources(folder: Path | None = None) -> list[Path]:
    """Every file that is compiled, of ``csrc/cuda`` or of another folder; they include the headers."""
    return sorted((folder or source_folder()).glob("*.cu"))


def folder() -> Path:
    """The cache: ``TORCH_EXTENSIONS_DIR``, as DeepSpeed's ops, or ``~/.cache``."""
    extensions, cache = os.environ.get("TORCH_EXTENSIONS_DIR"), os.environ.get("XDG_CACHE_HOME")
    return (Path(extensions) if extensions else Path(cache) if cache else Path.home() / ".cache") / "ds_kfac"


def library_name(flags: Sequence[str], source: Path | None = None) -> str:
    """A file name made of sources and flags: another one where anything is another. Raises BuildError."""
    identity = hashlib.sha256("\0".join(flags).encode())
    for file in sorted((source or source_folder()).iterdir()):
        if file.suffix in (".h", ".cu"):
            identity.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"cuda-{identity.hexdigest()[:16]}.so"


def build(
    compiler: Callable[[], str], flags: Sequence[str], *, source: Path | None = None, into: Path | None = None
) -> Path:
    """The shared library; compiled if there is none.

    Args:
        compiler: finds one; asked only if it is needed, so that what was built ahead of time runs without.
        source: another folder than ``csrc/cuda``.
        into: the folder to find or put it in; None: find it in :data:`BUILT` or find or put it in :func:`folder`.

    Raises:
        BuildError: it cannot be compiled.
    """
    library = library_name(flags, source)
    places = [into] if into else [BUILT, folder()]
    for place in places:
        if (place / library).exists():
            return place / library
    path = places[-1] / library
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                if into is None:
                    LOGGER.info("ds_kfac: compiling csrc/cuda, once; ahead of time: DS_KFAC_BUILD_OPS=1 pip install")
                _compile([compiler(), *flags, *map(str, sources(source))], path)
    except OSError as problem:
        raise BuildError(f"cannot write to {path.parent}: {problem}") from problem
    return path


def _compile(command: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.stem) as temporary:
        whole = Path(temporary) / path.name
        try:
            done = subprocess.run([*command, "-o", whole], capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise BuildError(f"{command[0]} does not run: {problem}") from problem
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
            raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'status {done.returncode}'}")
        os.replace(whole, path)


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Alone with ``path``; after ``seconds`` (None: LOCK_SECONDS), or where the file system has no locks, not alone."""
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


def find_nvcc() -> str | None:
    """The compiler of ``CUDA_HOME``, else of the path, else of /usr/local/cuda; None where there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", NVCC]
    return next(filter(None, map(shutil.which, candidates)), None)


def nvcc() -> str:
    """See :func:`find_nvcc`. Raises BuildError where there is none."""
    if (found := find_nvcc()) is None:
        raise BuildError("no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    return found


def nvcc_flags(architectures: Sequence[str]) -> list[str]:
    """For a shared library, which loads without a driver, with machine code for each architecture, e.g. ``90a``."""
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    return ["-std=c++17", "-O3", "--threads=0", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", *targets]


def installed(architecture: str | None) -> Path | None:
    """What was built ahead of time for a GPU, as nvcc names it, or for an older one of its generation, whose code runs
    there too; for any if None. What ends in a letter, such as "90a", is for that GPU alone."""
    names: Sequence[str] = ARCHITECTURES if architecture is None else [architecture]
    if architecture and architecture.isdigit():
        major, minor = divmod(int(architecture), 10)
        names = [f"{major}{lower}" for lower in range(minor, -1, -1)]
    found = (BUILT / library_name(nvcc_flags([name])) for name in names)
    return next((path for path in found if path.exists()), None)


def load(architecture: str) -> ctypes.CDLL:
    """For this GPU, built ahead of time or now. Raises RuntimeError: it cannot be built or loaded, and why."""
    try:
        return ctypes.CDLL(str(installed(architecture) or build(nvcc, nvcc_flags([architecture]))))
    except OSError as problem:
        raise RuntimeError(f"its library does not load: {problem}") from problem


def usable(architecture: str | None) -> tuple[Path | None, str]:
    """What was built ahead of time; and why there can be no library here, which needs no GPU, empty if there can."""
    try:
        if not (ahead := installed(architecture)):
            nvcc()
    except BuildError as why:
        return None, str(why)
    return ahead, ""


def rows(architecture: str | None) -> list[tuple[str, ...]]:
    """For the report: name, built ahead of time, can be used or built, and why not."""
    ahead, why = usable(architecture)
    here = ("kfac_cuda", "yes" if ahead else "no", "no" if why else "yes", why)
    return [("op library", "installed", "compatible", ""), here]


def wanted_architectures(environment: Mapping[str, str]) -> list[str]:
    """Of ``TORCH_CUDA_ARCH_LIST``, e.g. "8.0;9.0+PTX": 80 and 90a; empty where it is not set.

    Raises:
        BuildError: an entry that is no capability from 8.0 on.
    """
    names: dict[str, None] = {}
    for entry in environment.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split():
        known = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", entry)
        if known is None or int(known[1]) < 8:
            raise BuildError(
                f'TORCH_CUDA_ARCH_LIST has "{entry}"; expected capabilities from 8.0 on, such as "8.0;9.0"'
            )
        names[f"{known[1]}{known[2]}{'a' if known[1] == '9' else known[3]}"] = None
    return list(names)


def supported(compiler: str) -> list[str]:
    """Those of ``ARCHITECTURES`` that this nvcc knows; all of them if it does not list them."""
    try:
        said = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return list(ARCHITECTURES)
    known = said.stdout.split()
    return [name for name in ARCHITECTURES if f"sm_{name.rstrip('a')}" in known] or list(ARCHITECTURES)


def build_ahead(into: Path, environment: Mapping[str, str]) -> list[Path]:
    """What ``pip install`` compiles, as with ``DS_BUILD_OPS`` and ``DS_BUILD_<OP>``: with ``DS_KFAC_BUILD_OPS=1`` if it
    can be, with ``DS_KFAC_BUILD_CUDA=1`` in any case, with 0 in none; for all architectures that the environment names.

    Raises:
        BuildError: it was asked for by its own variable and cannot be built.
    """
    built: list[Path] = []
    into.mkdir(parents=True, exist_ok=True)
    wanted = environment.get("DS_KFAC_BUILD_CUDA")
    if (wanted or environment.get("DS_KFAC_BUILD_OPS", "0")) == "1":
        _, why = usable(None)
        if why and wanted:
            raise BuildError(f"DS_KFAC_BUILD_CUDA=1, but kfac_cuda cannot be built: {why}")
        if why:
            print(f" [WARNING]  kfac_cuda: {why}")
        else:
            names = wanted_architectures(environment) or supported(nvcc())
            built = [build(nvcc, nvcc_flags([name]), into=into) for name in names]
    for lock in into.glob("*.lock"):
        lock.unlink()
    return built
