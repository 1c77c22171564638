"""``python -m ds_kfac doctor``: whether this environment will work, and how to fix it if not, in
twelve lines, which a bug report should have, too."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

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

Answer = tuple[str, str]
"""(what is there, what to do about it or "")"""
NEEDS = ("torch>=2.8", f"deepspeed>={OLDEST}")
"""Requirements if ds_kfac is not installed but imported from its sources, where no metadata lists
them."""
TESTED_RANGES = {
    "torch": ("2.8.0", "2.15.0"),
    "deepspeed": (TESTED[0], TESTED[-1]),
    "triton": ("3.6.0", "3.9.0"),
    "transformers": ("5.23.0", "5.24.0"),
}
"""Package -> the oldest and the newest version with which tests ran."""


def doctor(_: object = None) -> tuple[str, int]:
    """Return the verdict, then a line for each of :data:`QUESTIONS`; and the exit status, 1 if
    anything has to be mended."""
    answers = {name: ask() for name, ask in QUESTIONS.items()}
    wrong = [name for name, (_, remedy) in answers.items() if remedy]
    verdict = f"to be mended: {', '.join(wrong)}" if wrong else "this environment will work"
    width = max(map(len, answers))
    lines = [
        f"  {name:{width}}  {what}{f' -> {remedy}' if remedy else ''}"
        for name, (what, remedy) in answers.items()
    ]
    return "\n".join([f"ds_kfac doctor: {verdict}", *lines]), int(bool(wrong))


def _package(name: str) -> Answer:
    try:
        listed = requires("ds_kfac") or NEEDS
    except PackageNotFoundError:
        listed = NEEDS
    need = next(each for each in map(Requirement, listed) if each.name == name)
    try:
        has = version(name)
    except PackageNotFoundError:
        return "not installed", f"pip install '{need}'"
    fits = need.specifier.contains(has.partition("+")[0], prereleases=True)
    return _with_range(name, has), "" if fits else f"pip install '{need}'"


def _with_range(name: str, has: str) -> str:
    """A version, and whether it lies in the tested range."""
    oldest, newest = TESTED_RANGES[name]
    release = [Version(each).release for each in (oldest, has, newest)]
    return (
        f"{name} {has}, {'inside' if release == sorted(release) else 'outside of'} the tested "
        f"{oldest} to {newest}"
    )


def _others() -> Answer:
    """Optional packages, and those whose versions are asked for after a fault."""
    texts = [f"Python {platform.python_version()}"]
    for name in ("ds_kfac", "triton", "transformers", "numpy", "pydantic"):
        try:
            texts.append(
                _with_range(name, version(name))
                if name in TESTED_RANGES
                else f"{name} {version(name)}"
            )
        except PackageNotFoundError:
            texts.append(f"no {name}")
    return "; ".join(texts), ""


def _device() -> Answer:
    kind, count = get_accelerator().device_name(), get_accelerator().device_count()
    if kind == "cpu":
        seen = torch.cuda.is_available()
        return (
            f"cpu, {os.cpu_count()} cores",
            "unset DS_ACCELERATOR: torch sees a GPU" if seen else "",
        )
    problem = gpu_problem() if kind == "cuda" else None
    what = (
        f"{count} x {torch.cuda.get_device_name()} (sm_{gpu_architecture()})"
        if kind == "cuda"
        else f"{count} x {kind}"
    )
    return (
        f"{what}{f'; ds_kfac runs in plain torch here: {problem}' if problem else ''}",
        "" if count else "no device",
    )


def _communication() -> Answer:
    backend = get_accelerator().communication_backend_name()
    name = "gloo" if get_accelerator().device_name() == "cpu" else backend
    has = (
        torch.distributed.is_available()
        and getattr(torch.distributed, f"is_{name}_available", lambda: True)()
    )
    return name, "" if has else f"this build of torch has no {name}: install another one"


def _compiler() -> Answer:
    path = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    ninja = shutil.which("ninja")
    missing = [] if path else ["a C++ compiler (apt install g++)"]
    missing += [] if ninja else ["ninja (pip install ninja)"]
    return (
        f"{path}, {ninja}, nvcc {find_nvcc() or 'nowhere'}",
        f"for ops that are compiled at first use: {' and '.join(missing)}" if missing else "",
    )


def _cache() -> Answer:
    folder = builds_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        return f"{folder}: {problem}", "set TORCH_EXTENSIONS_DIR to a folder that can be written to"
    locks = sorted(folder.glob("*/lock"))
    if not hasattr(cpp_extension, "FileLock"):  # torch before 2.14: the file is the lock
        remedy = (
            f"if no build runs now, a killed one left {'it' if len(locks) == 1 else 'them'}, "
            f"and all runs wait"
        )
        return (
            (_names(locks), f"{remedy}: remove {_names(locks)}")
            if locks
            else (f"{folder}, writable", "")
        )
    held = [lock for lock in locks if _is_held(lock)]
    waits = (
        f"; a build runs now, and other runs wait for it: {_names(held)} is locked" if held else ""
    )
    return f"{folder}, writable{waits}", ""


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _is_held(lock: Path) -> bool:
    """Whether a process holds a lock of torch 2.14 or newer. Its file stays after the build; the
    system frees it when the process ends, however that ends."""
    from filelock import FileLock, Timeout  # which such a torch needs itself

    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # somebody else's file
        return False


def _shm() -> Answer:
    if not needs_compiled():
        return "not needed", ""
    later = (
        f"compiled at the first start, for minutes, unless "
        f'deepspeed.ops.__compatible_ops__["{COMPILED}"] = False'
    )
    return "compiled" if is_compiled(COMPILED) else later, ""


def _launcher() -> Answer:
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world is None:
        return (
            "none in this shell: `deepspeed train.py` or torchrun start ranks; without, a script "
            "is one rank",
            "",
        )
    lacking = [
        name
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    what = f"rank {rank} of {world}"
    return (
        what,
        f"{', '.join(lacking)} not set: unset RANK and WORLD_SIZE, or set them all"
        if lacking
        else "",
    )


def _enabled() -> Answer:
    word = os.environ.get("DS_KFAC", "")
    if not word:
        return (
            "DS_KFAC is not set: scripts need `python -m ds_kfac run`, DS_KFAC=1 or import ds_kfac",
            "",
        )
    there = any(isinstance(finder, ds_kfac_startup.Finder) for finder in sys.meta_path)
    return (
        f"DS_KFAC={word}",
        "" if there else "Python has not read ds_kfac.pth at its start: pip install ds_kfac",
    )


QUESTIONS: dict[str, Callable[[], Answer]] = {
    "torch": lambda: _package("torch"),
    "deepspeed": lambda: _package("deepspeed"),
    "also here": _others,
    "device": _device,
    "communication": _communication,
    "compiler": _compiler,
    "cache": _cache,
    COMPILED: _shm,
    "threads": lambda: (f"{torch.get_num_threads()} a process", ""),
    "ops": lambda: (str(chosen(get_accelerator().device_name())), ""),
    "launcher": _launcher,
    "switched on": _enabled,
}
