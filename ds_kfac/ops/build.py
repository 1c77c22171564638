"""The library of csrc/cuda: compiled by nvcc ahead of time or at first use, and kept, one per set of sources and flags.

A library is found next to the package (built ahead of time) or in the cache, else compiled under a lock. The lock is
the kernel's and ends with its process; a process that waits too long compiles for itself. Libraries appear whole: they
are renamed into place. Of the standard library alone: setup.py must run where neither torch nor DeepSpeed is installed.
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


ARCHITECTURES = ("80", "90a", "100", "120")
"""A100, H100 and H200, B200, RTX 50; others compile for themselves, just in time."""

NVCC = "/usr/local/cuda/bin/nvcc"
"""Where it usually is."""
STRICT = (
    *("-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"),
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage,-Werror",
)
"""A warning is an error, so are registers spilled to memory; ptxas says how many registers a kernel takes."""


def find_nvcc() -> str | None:
    """The compiler of ``CUDA_HOME``, else of the path, else of /usr/local/cuda; None where there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + ["nvcc", NVCC]
    return next((found for found in map(shutil.which, candidates) if found), None)


def nvcc() -> str:
    """See :func:`find_nvcc`.

    Raises:
        BuildError: there is none.
    """
    found = find_nvcc()
    if found is None:
        raise BuildError("no nvcc (CUDA_HOME, PATH, /usr/local/cuda)")
    return found


def sources() -> list[Path]:
    """Every file of the library; headers are included by them."""
    return sorted(find_sources("cuda").glob("*.cu"))


def nvcc_flags(architectures: Sequence[str]) -> list[str]:
    """For a shared library, which loads without a driver, with machine code for each architecture, e.g. ``90a``."""
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    return ["-std=c++17", "-O3", "--threads=0", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", *targets]


class CUDABuilder:
    """Builds and finds csrc/cuda, a library for each architecture. It is named and asked as DeepSpeed's OpBuilder,
    from which it is not derived: that links libtorch.

    Args:
        architecture: of the GPU, as nvcc names it, e.g. "90a"; None: there is none, and no library to load.

    Attributes:
        NAME: of the report.
        BUILD_VAR: environment variable; 1 compiles when the package is installed, 0 does not, whatever
            ``DS_KFAC_BUILD_OPS`` says.
        error_log: why :meth:`is_compatible` last said no.
    """

    NAME, BUILD_VAR, PART = "kfac_cuda", "DS_KFAC_BUILD_CUDA", "cuda"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture
        self.error_log: str | None = None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it can be loaded here or built: neither needs the device that it is for."""
        self.error_log = None
        try:
            if self.installed() is None:
                find_sources(self.PART)
                nvcc()
        except BuildError as problem:
            self.error_log = str(problem)
            if verbose:
                print(f" [WARNING]  {self.NAME}: {problem}")
        return self.error_log is None

    def installed(self) -> Path | None:
        """For this GPU or an older one of its generation, whose code runs here too; for any where there is no GPU."""
        for name in runs_on(self.architecture) if self.architecture else ARCHITECTURES:
            if path := find(library_name(self.PART, nvcc_flags([name])), [BUILT]):
                return path
        return None

    def build_ahead(self, into: Path) -> list[Path]:
        """Compile for all architectures that the environment names. Raises BuildError."""
        names = wanted_architectures(os.environ) or supported(nvcc())
        return [build(self.PART, nvcc, nvcc_flags([name]), into=into) for name in names]

    def path(self) -> Path:
        """Of the library for this machine, built ahead of time or now. Raises BuildError."""
        if self.architecture is None:
            raise BuildError("there is no GPU to build it for")
        return self.installed() or build(self.PART, nvcc, nvcc_flags([self.architecture]))

    def load(self) -> ctypes.CDLL:
        """Raises RuntimeError: it cannot be built or loaded, and why."""
        try:
            return ctypes.CDLL(str(self.path()))
        except OSError as problem:
            raise RuntimeError(f"its library does not load: {problem}") from problem


def runs_on(architecture: str) -> list[str]:
    """Architectures whose machine code a GPU runs, its own first: 86 is its own and 80. What ends in a letter is for
    that GPU alone."""
    if not architecture.isdigit():
        return [architecture]
    major, minor = divmod(int(architecture), 10)
    return [f"{major}{lower}" for lower in range(minor, -1, -1)]


def wanted_architectures(environment: Mapping[str, str]) -> list[str]:
    """Of ``TORCH_CUDA_ARCH_LIST``, e.g. "8.0;9.0+PTX": 80 and 90a; empty where it is not set.

    Raises:
        BuildError: an entry that is no capability from 8.0 on.
    """
    names = []
    for entry in re.split(r"[;\s]+", environment.get("TORCH_CUDA_ARCH_LIST", "").strip()):
        found = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", entry)
        if entry and (found is None or int(found[1]) < 8):
            raise BuildError(
                f'TORCH_CUDA_ARCH_LIST has "{entry}"; expected capabilities from 8.0 on, such as "8.0;9.0"'
            )
        if found is not None:
            names.append(f"{found[1]}{found[2]}{'a' if found[1] == '9' else found[3]}")
    return list(dict.fromkeys(names))


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
    can be, with the builder's own variable in any case.

    Raises:
        BuildError: it was asked for by its own variable and cannot be built.
    """
    builder, built = CUDABuilder(), []
    into.mkdir(parents=True, exist_ok=True)
    asked = environment.get(builder.BUILD_VAR)
    if (asked or environment.get("DS_KFAC_BUILD_OPS", "0")) == "1":
        if builder.is_compatible(verbose=asked is None):
            built = builder.build_ahead(into)
        elif asked:
            raise BuildError(f"{builder.BUILD_VAR}=1, but {builder.NAME} cannot be built: {builder.error_log}")
    for lock in into.glob("*.lock"):
        lock.unlink()
    return built


def rows(builder: CUDABuilder) -> list[tuple[str, ...]]:
    """For the report: name, built ahead of time, can be used or built, and why not."""
    compatible = builder.is_compatible()
    ahead = builder.installed() if compatible else None
    return [
        ("op library", "installed", "compatible", ""),
        (builder.NAME, "yes" if ahead else "no", "yes" if compatible else "no", builder.error_log or ""),
    ]
