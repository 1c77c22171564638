"""The library of csrc/cuda: nvcc compiles it ahead of time or at first use, to a file per set of
sources and flags.

It is next to the package (built ahead of time) or in the cache, else it is compiled under a lock,
which ends with its process; a process that waits too long for the lock compiles without it. A
finished library is renamed into place, so none is ever read half-written. Standard library only:
setup.py must run without torch and DeepSpeed.
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
"""Where ``DS_KFAC_BUILD_OPS=1 pip install`` puts libraries."""
COMPILE_SECONDS = 300
LOCK_SECONDS = 120
ARCHITECTURES = ("80", "90a", "100", "120")
"""A100, H100 and H200, B200, RTX 50; for other GPUs the library is compiled at first use."""
NVCC = "/usr/local/cuda/bin/nvcc"


class BuildError(RuntimeError):
    """Why there is no library, in one line for people."""


def source_folder() -> Path:
    """``csrc/cuda``: in an installed package, or next to it in a checkout."""
    for root in (PACKAGE, PACKAGE.parent):
        if (root / "csrc" / "cuda").is_dir():
            return root / "csrc" / "cuda"
    raise BuildError("its sources, csrc/cuda, are not installed")


def sources(folder: Path | None = None) -> list[Path]:
    """The files to compile, ``*.cu`` of ``folder``; None: of ``csrc/cuda``. Headers are included by
    them."""
    return sorted((folder or source_folder()).glob("*.cu"))


def folder() -> Path:
    """Return the cache folder: in ``TORCH_EXTENSIONS_DIR``, as for DeepSpeed's ops, else in
    ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    for variable in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        parent = os.environ.get(variable)
        if parent:
            return Path(parent) / "ds_kfac"
    return Path.home() / ".cache" / "ds_kfac"


def library_name(flags: Sequence[str], source: Path | None = None) -> str:
    """A file name with a hash of sources and flags. Raises BuildError if there are no sources."""
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
    """Path of the shared library; it is compiled if there is none.

    Args:
        compiler: returns a compiler's path; only called to compile: a library built ahead of time
            needs no compiler.
        source: folder of the sources; None: ``csrc/cuda``.
        into: folder of the library; None: :data:`BUILT` if it is there, else :func:`folder`.

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
                    LOGGER.info(
                        "ds_kfac: compiling csrc/cuda, once; ahead of time: DS_KFAC_BUILD_OPS=1 "
                        "pip install"
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
    """Hold the lock file ``path``. After ``seconds`` (None: LOCK_SECONDS), or on a file system
    without locks, the body runs without the lock."""
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
    """Path of nvcc: in ``CUDA_HOME`` or ``CUDA_PATH``, else in PATH, else in /usr/local/cuda; None:
    nowhere."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", NVCC]
    return next(filter(None, map(shutil.which, candidates)), None)


def nvcc() -> str:
    """Path of nvcc, see :func:`find_nvcc`. Raises BuildError if there is none."""
    compiler = find_nvcc()
    if compiler is None:
        raise BuildError("no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    return compiler


def nvcc_flags(architectures: Sequence[str]) -> list[str]:
    """Flags for a shared library that loads without a driver and has machine code for architectures
    such as ``90a``."""
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
    """Path of a library built ahead of time that runs on a GPU ``architecture``, as nvcc names it;
    None: there is none.

    Code for an older GPU of the same generation runs there, too, unless its name ends in a letter,
    such as "90a".
    """
    names = [architecture]
    if architecture.isdigit():
        major, minor = divmod(int(architecture), 10)
        names = [f"{major}{lower}" for lower in range(minor, -1, -1)]
    paths = (BUILT / library_name(nvcc_flags([name])) for name in names)
    return next((path for path in paths if path.exists()), None)


def load(architecture: str) -> ctypes.CDLL:
    """The library for a GPU, built ahead of time or now. Raises RuntimeError: why it cannot be
    built or loaded."""
    try:
        return ctypes.CDLL(str(installed(architecture) or build(nvcc, nvcc_flags([architecture]))))
    except OSError as problem:
        raise RuntimeError(f"its library does not load: {problem}") from problem


def wanted_architectures(environment: Mapping[str, str]) -> list[str]:
    """The architectures in ``TORCH_CUDA_ARCH_LIST``: 80 and 90a for "8.0;9.0+PTX"; [] if it is not
    set. Raises BuildError for an entry that is no compute capability from 8.0 on."""
    names: dict[str, None] = {}
    for entry in environment.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split():
        parts = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", entry)
        if parts is None or int(parts[1]) < 8:
            raise BuildError(
                f'TORCH_CUDA_ARCH_LIST has "{entry}"; expected capabilities from 8.0 on, such as '
                f'"8.0;9.0"'
            )
        suffix = "a" if parts[1] == "9" else parts[3]
        names[f"{parts[1]}{parts[2]}{suffix}"] = None
    return list(names)


def supported(compiler: str) -> list[str]:
    """The entries of ``ARCHITECTURES`` that this nvcc can compile for; all of them if it does not
    list any."""
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
    """Compile what ``pip install`` shall compile, for all architectures that the environment names.
    Returns the paths.

    As with DeepSpeed's ``DS_BUILD_OPS`` and ``DS_BUILD_<OP>``: ``DS_KFAC_BUILD_OPS=1`` builds the
    library if that is possible, ``DS_KFAC_BUILD_CUDA=1`` raises BuildError if it is not,
    ``DS_KFAC_BUILD_CUDA=0`` builds nothing.
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
