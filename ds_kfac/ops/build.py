"""Compile the CUDA library from csrc/cuda with nvcc, either ahead of time or at first use.

Each combination of sources and flags has its own library file. The file lies inside the package if
it was built ahead of time, otherwise in the cache folder. If neither folder has the file, the
library is compiled under a lock. The lock is released when the process that holds it ends, and a
process that waits too long for the lock compiles without it. A finished library is renamed into
place, so no process can load a half-written one.

This module imports only the standard library, because setup.py must run without torch and
DeepSpeed.
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

LOGGER = logging.getLogger("ds_kfac")
PACKAGE = Path(__file__).parent.parent
BUILT = PACKAGE / "ops" / "built"
"""Folder in which ``DS_KFAC_BUILD_OPS=1 pip install`` puts libraries."""
COMPILE_SECONDS = 300
LOCK_SECONDS = 120
ARCHITECTURES = ("80", "90a", "100", "120")
"""A100 (80), H100 and H200 (90a), B200 (100), RTX 50 (120). For any other GPU the library is
compiled at first use."""
NVCC = "/usr/local/cuda/bin/nvcc"


class BuildError(RuntimeError):
    """The library cannot be built. The message tells users the reason in one line."""


def source_folder() -> Path:
    """Return the folder ``csrc/cuda``, inside an installed package or next to the package in a
    checkout."""
    for root in (PACKAGE, PACKAGE.parent):
        if (root / "csrc" / "cuda").is_dir():
            return root / "csrc" / "cuda"
    raise BuildError("its sources, csrc/cuda, are not installed")


def sources(folder: Path | None = None) -> list[Path]:
    """Return the files to compile: all ``*.cu`` files of ``folder``, or of ``csrc/cuda`` if it is
    None. Headers are not listed, because these files include them."""
    return sorted((folder or source_folder()).glob("*.cu"))


def folder() -> Path:
    """Return the cache folder. It is in ``TORCH_EXTENSIONS_DIR`` if that is set, as for DeepSpeed's
    ops; otherwise in ``XDG_CACHE_HOME`` if that is set; otherwise in ``~/.cache``."""
    for variable in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        parent = os.environ.get(variable)
        if parent:
            return Path(parent) / "ds_kfac"
    return Path.home() / ".cache" / "ds_kfac"


def library_name(flags: Sequence[str], source: Path | None = None) -> str:
    """Return a file name that contains a hash of the sources and flags. Raise BuildError if there
    are no sources."""
    identity = hashlib.sha256("\0".join(flags).encode())
    for file in sorted((source or source_folder()).iterdir()):
        if file.suffix in (".h", ".cu"):
            identity.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"cuda-{identity.hexdigest()[:16]}.so"


def build(
    compiler: Callable[[], str],
    flags: Sequence[str],
    *,
    source: Path | None = None,
    into: Path | None = None,
) -> Path:
    """Return the path of the shared library, and compile it first if there is none.

    Args:
        compiler: returns the path of a compiler. It is called only if the library must be compiled,
            so a machine with a library that was built ahead of time needs no compiler.
        flags: the compiler's flags.
        source: folder of the sources; None: ``csrc/cuda``.
        into: folder of the library; None: :data:`BUILT` if the library is there, otherwise
            :func:`folder`.

    Raises:
        BuildError: the library cannot be compiled.
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
                    LOGGER.info(
                        "ds_kfac: compiling csrc/cuda. This is done once; to do it at "
                        "installation, use DS_KFAC_BUILD_OPS=1 pip install"
                    )
                _compile([compiler(), *flags, *map(str, sources(source))], path)
    except OSError as problem:
        raise BuildError(f"cannot write to {path.parent}: {problem}") from problem
    return path


def _compile(command: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.stem) as temporary:
        library = Path(temporary) / path.name
        try:
            done = subprocess.run(
                [*command, "-o", library], capture_output=True, text=True, timeout=COMPILE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise BuildError(f"{command[0]} does not run: {problem}") from problem
        if done.returncode:
            lines = done.stderr.splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines
            why = errors[0].strip() if errors else f"status {done.returncode}"
            raise BuildError(f"{command[0]} failed: {why}")
        os.replace(library, path)


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` while the body runs. The body runs without the lock if the lock
    is not free after ``seconds`` (None: LOCK_SECONDS), or if the file system has no locks."""
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
    """Return the path of nvcc, or None if there is none. Search ``CUDA_HOME`` and ``CUDA_PATH``,
    then PATH, then /usr/local/cuda."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", NVCC]
    return next(filter(None, map(shutil.which, candidates)), None)


def nvcc() -> str:
    """Return the path of nvcc, see :func:`find_nvcc`. Raise BuildError if there is none."""
    compiler = find_nvcc()
    if compiler is None:
        raise BuildError("no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    return compiler


def nvcc_flags(architectures: Sequence[str]) -> list[str]:
    """Return nvcc's flags for a shared library that has machine code for the architectures, such as
    ``90a``, and that loads without a driver."""
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    return [
        "-std=c++17",
        "-O3",
        "--threads=0",
        "-shared",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *targets,
    ]


def installed(architecture: str) -> Path | None:
    """Return the path of a library that was built ahead of time and that runs on a GPU of this
    architecture, or None.

    A GPU also runs a library that was built for an older GPU of the same generation, unless the
    architecture of the library ends in a letter, as "90a" does.

    Args:
        architecture: the GPU's architecture as nvcc names it, such as "90a".
    """
    names = [architecture]
    if architecture.isdigit():
        major, minor = divmod(int(architecture), 10)
        names = [f"{major}{lower}" for lower in range(minor, -1, -1)]
    paths = (BUILT / library_name(nvcc_flags([name])) for name in names)
    return next((path for path in paths if path.exists()), None)


def load(architecture: str) -> ctypes.CDLL:
    """Load the library for a GPU architecture, and build it first if necessary. Raise RuntimeError
    with the reason if the library cannot be built or loaded."""
    try:
        return ctypes.CDLL(str(installed(architecture) or build(nvcc, nvcc_flags([architecture]))))
    except OSError as problem:
        raise RuntimeError(f"its library does not load: {problem}") from problem


def wanted_architectures(environment: Mapping[str, str]) -> list[str]:
    """Return the architectures in ``TORCH_CUDA_ARCH_LIST``, for example 80 and 90a for
    "8.0;9.0+PTX". Return [] if the variable is not set. Raise BuildError for an entry that is not a
    compute capability of at least 8.0."""
    names: dict[str, None] = {}
    for entry in environment.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split():
        parts = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", entry)
        if parts is None or int(parts[1]) < 8:
            raise BuildError(
                f'TORCH_CUDA_ARCH_LIST has "{entry}"; expected capabilities from 8.0 on, such as '
                '"8.0;9.0"'
            )
        suffix = "a" if parts[1] == "9" else parts[3]
        names[f"{parts[1]}{parts[2]}{suffix}"] = None
    return list(names)


def supported(compiler: str) -> list[str]:
    """Return the entries of ``ARCHITECTURES`` for which this nvcc can compile. Return all entries
    if nvcc cannot list its architectures, or if its list contains none of them."""
    try:
        listed = subprocess.run(
            [compiler, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return list(ARCHITECTURES)
    codes = listed.stdout.split()
    return [name for name in ARCHITECTURES if f"sm_{name.rstrip('a')}" in codes] or list(
        ARCHITECTURES
    )


def build_ahead(into: Path, environment: Mapping[str, str]) -> list[Path]:
    """Compile during ``pip install``, for all architectures that the environment names. Return the
    paths of the libraries.

    These environment variables work as DeepSpeed's ``DS_BUILD_OPS`` and ``DS_BUILD_<OP>`` do.
    ``DS_KFAC_BUILD_OPS=1`` builds the library if that is possible. ``DS_KFAC_BUILD_CUDA=1`` does
    the same, but raises BuildError if the library cannot be built. ``DS_KFAC_BUILD_CUDA=0`` builds
    nothing.
    """
    built: list[Path] = []
    into.mkdir(parents=True, exist_ok=True)
    wanted = environment.get("DS_KFAC_BUILD_CUDA")
    if (wanted or environment.get("DS_KFAC_BUILD_OPS", "0")) == "1":
        try:
            compiler = nvcc()
        except BuildError as why:
            if wanted:
                raise BuildError(
                    f"DS_KFAC_BUILD_CUDA=1, but kfac_cuda cannot be built: {why}"
                ) from None
            print(f" [WARNING]  kfac_cuda: {why}")
        else:
            names = wanted_architectures(environment) or supported(compiler)
            built = [build(nvcc, nvcc_flags([name]), into=into) for name in names]
    for lock in into.glob("*.lock"):
        lock.unlink()
    return built
