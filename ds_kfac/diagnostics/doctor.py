"""``python -m ds_kfac doctor``: check whether this environment will work, and say how to fix it.

It prints a verdict and twelve lines of facts. Every bug report should contain them.
"""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from packaging.requirements import Requirement
from packaging.version import Version
from torch.utils import cpp_extension

import ds_kfac_startup
from ds_kfac.diagnostics.preflight import COMPILED, builds_folder, is_compiled, needs_compiled
from ds_kfac.ops.build import find_nvcc
from ds_kfac.ops.check import gpu_architecture, gpu_problem
from ds_kfac.ops.dispatch import chosen
from ds_kfac.zero.deepspeed_versions import OLDEST, TESTED

NEEDS = ("torch>=2.8", f"deepspeed>={OLDEST}")
"""Requirements of ds_kfac. They are used only if ds_kfac is imported from its sources without being
installed, because then it has no package metadata."""
TESTED_RANGES = {
    "torch": ("2.8.0", "2.15.0"),
    "deepspeed": (TESTED[0], TESTED[-1]),
    "triton": ("3.6.0", "3.9.0"),
    "transformers": ("5.23.0", "5.24.0"),
}
"""Package -> the oldest and the newest version with which the tests were run."""
OPTIONAL = ("ds_kfac", "triton", "transformers", "numpy", "pydantic")
"""Packages whose versions matter in a bug report. None of them has to be installed."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Answer(NamedTuple):
    """The answer to one of :data:`QUESTIONS`.

    Attributes:
        state: what was found in this environment.
        remedy: what the user has to do; empty if nothing is wrong.
    """

    state: str
    remedy: str = ""


def doctor(_: object = None) -> tuple[str, int]:
    """Return the text of the command and its exit status, which is 1 if anything has to be fixed.

    The first line is the verdict. A line for each of :data:`QUESTIONS` follows.
    """
    answers = {name: ask() for name, ask in QUESTIONS.items()}
    wrong = [name for name, answer in answers.items() if answer.remedy]
    verdict = f"to be fixed: {', '.join(wrong)}" if wrong else "this environment will work"
    width = max(map(len, answers))
    lines = [f"ds_kfac doctor: {verdict}"]
    for name, answer in answers.items():
        remedy = f" -> {answer.remedy}" if answer.remedy else ""
        lines.append(f"  {name:{width}}  {answer.state}{remedy}")
    return "\n".join(lines), int(bool(wrong))


def _package(name: str) -> Answer:
    """Answer whether a required package has a version that ds_kfac accepts."""
    try:
        requirements = requires("ds_kfac") or NEEDS
    except PackageNotFoundError:
        requirements = NEEDS
    required = next(each for each in map(Requirement, requirements) if each.name == name)
    install = f"pip install '{required}'"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Answer("not installed", install)
    release = installed.partition("+")[0]
    is_accepted = required.specifier.contains(release, prereleases=True)
    return Answer(_with_range(name, installed), "" if is_accepted else install)


def _with_range(name: str, installed: str) -> str:
    """Return a text with a package's name and version, and whether the version is in the tested
    range."""
    oldest, newest = TESTED_RANGES[name]
    release = Version(installed).release
    is_inside = Version(oldest).release <= release <= Version(newest).release
    where = "inside" if is_inside else "outside of"
    return f"{name} {installed}, {where} the tested range {oldest} to {newest}"


def _optional_packages() -> Answer:
    texts = [f"Python {platform.python_version()}"]
    for name in OPTIONAL:
        try:
            installed = version(name)
        except PackageNotFoundError:
            texts.append(f"no {name}")
            continue
        is_tested = name in TESTED_RANGES
        texts.append(_with_range(name, installed) if is_tested else f"{name} {installed}")
    return Answer("; ".join(texts))


def _device() -> Answer:
    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cpu":
        hides_gpu = torch.cuda.is_available()
        return Answer(
            f"cpu, {os.cpu_count()} cores",
            "torch sees a GPU: unset DS_ACCELERATOR to use it" if hides_gpu else "",
        )
    count = accelerator.device_count()
    remedy = "" if count else "no device was found: check the driver and CUDA_VISIBLE_DEVICES"
    if name != "cuda":
        return Answer(f"{count} x {name}", remedy)
    state = f"{count} x {torch.cuda.get_device_name()} (sm_{gpu_architecture()})"
    problem = gpu_problem()
    if problem:
        state += f"; ds_kfac runs in plain torch here: {problem}"
    return Answer(state, remedy)


def _communication() -> Answer:
    accelerator = get_accelerator()
    is_cpu = accelerator.device_name() == "cpu"
    name = "gloo" if is_cpu else accelerator.communication_backend_name()
    is_available = (
        torch.distributed.is_available()
        and getattr(torch.distributed, f"is_{name}_available", lambda: True)()
    )
    remedy = f"this build of torch has no {name}: install a build that has it"
    return Answer(name, "" if is_available else remedy)


def _compiler() -> Answer:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    ninja = shutil.which("ninja")
    missing = []
    if not compiler:
        missing.append("a C++ compiler (apt install g++)")
    if not ninja:
        missing.append("ninja (pip install ninja)")
    remedy = f"ops that are compiled at first use need {' and '.join(missing)}" if missing else ""
    return Answer(f"{compiler}, {ninja}, nvcc {find_nvcc() or 'nowhere'}", remedy)


def _cache() -> Answer:
    """Answer whether the folder of compiled ops is writable, and whether a build is locked."""
    folder = builds_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        return Answer(
            f"{folder}: {problem}", "set TORCH_EXTENSIONS_DIR to a folder that can be written to"
        )
    writable = f"{folder}, writable"
    locks = sorted(folder.glob("*/lock"))
    file_is_lock = not hasattr(cpp_extension, "FileLock")  # torch before 2.14
    if file_is_lock and locks:
        names = _names(locks)
        them = "this lock" if len(locks) == 1 else "these locks"
        return Answer(
            names,
            f"if no build is running now, a killed build has left {them}, and every run waits "
            f"until you remove {names}",
        )
    held = [] if file_is_lock else [lock for lock in locks if _is_held(lock)]
    if held:
        names = _names(held)
        writable += f"; a build runs now, and other runs wait for it: {names} is locked"
    return Answer(writable)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a lock whose file torch 2.14 or newer has made.

    The file stays after the build. The system frees the lock when the process that holds it ends,
    even if the process is killed.
    """
    from filelock import FileLock, Timeout  # a torch that makes such locks depends on it

    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # the file belongs to another user
        return False


def _shm() -> Answer:
    """Answer whether :data:`COMPILED`, which DeepSpeed needs on a CPU, is compiled."""
    if not needs_compiled():
        return Answer("not needed")
    if is_compiled(COMPILED):
        return Answer("compiled")
    return Answer(
        "will be compiled at the first start, which takes minutes; to avoid it set "
        f'deepspeed.ops.__compatible_ops__["{COMPILED}"] = False'
    )


def _launcher() -> Answer:
    rank = os.environ.get("RANK")
    world = os.environ.get("WORLD_SIZE")
    if rank is None and world is None:
        return Answer(
            "none in this shell: start ranks with `deepspeed train.py` or torchrun; a script that "
            "is started without a launcher runs as one rank"
        )
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    remedy = f"{', '.join(missing)} not set: set what is missing, or unset RANK and WORLD_SIZE"
    return Answer(f"rank {rank} of {world}", remedy if missing else "")


def _enabled() -> Answer:
    value = os.environ.get("DS_KFAC", "")
    if not value:
        return Answer(
            "DS_KFAC is not set: to use K-FAC, start a script with `python -m ds_kfac run`, set "
            "DS_KFAC=1, or import ds_kfac in the script"
        )
    is_installed = any(isinstance(finder, ds_kfac_startup.Finder) for finder in sys.meta_path)
    remedy = "Python did not read ds_kfac.pth when it started: pip install ds_kfac"
    return Answer(f"DS_KFAC={value}", "" if is_installed else remedy)


QUESTIONS: dict[str, Callable[[], Answer]] = {
    "torch": lambda: _package("torch"),
    "deepspeed": lambda: _package("deepspeed"),
    "also here": _optional_packages,
    "device": _device,
    "communication": _communication,
    "compiler": _compiler,
    "cache": _cache,
    COMPILED: _shm,
    "threads": lambda: Answer(f"{torch.get_num_threads()} a process"),
    "ops": lambda: Answer(str(chosen(get_accelerator().device_name()))),
    "launcher": _launcher,
    "switched on": _enabled,
}
"""Name of a line of the output -> the function that finds the line's answer."""
