"""Do the tests fail when the code is wrong? One-line mutants, each with the tests that should kill
it.

    python -m tests.campaign.mutants                   # all of them, about 40 minutes
    python -m tests.campaign.mutants --only wire ema   # by words in their name or file
    python -m tests.campaign.mutants --list

A mutant is applied in a copy of the repository, which is kept for all of them so that C++ ops are
built once. Ends with 1 if one survived, or if its old text is gone: then the table no longer tests
what it says.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

import pytest

from tests.campaign.mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "ds_kfac",
    "ds_kfac_startup.py",
    "ds_kfac.pth",
    "tests",
    "csrc",
    "configs",
    "examples",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "setup.py",
    "README.md",
)
TIMEOUT = 900
FAILED = 1
"""Exit code of pytest."""


def copy(target: Path) -> None:
    """The tree as it is now, without what was built in it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results", "*.so", ".venv")
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)


def run(tree: Path, tests: list[str]) -> tuple[int, str]:
    """pytest's exit code and the end of what it printed; -1 after a timeout.

    In a fork of this process, which has imported torch and deepspeed: that takes longer than most
    tests.
    """
    log = tree / "log"
    child = os.fork()
    if child == 0:
        _tested_here(tree, tests, log)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), log.read_text()[-3000:]
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1, "timeout"


def _tested_here(tree: Path, tests: list[str], log: Path) -> NoReturn:
    """Never returns. Nothing of this repository that was imported before is used."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(tree)
    sys.dont_write_bytecode = True  # of a mutant, the original's might be taken for it
    sys.path[:] = [
        str(tree),
        *(entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, tree)),
    ]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "ds_kfac")]:
        del sys.modules[name]
    os.environ |= {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_EXTENSIONS_DIR": str(tree / "built"),
    }
    code = 70
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def outcome(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """What became of a mutant, and why."""
    path = tree / "ds_kfac" / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.old) != 1:
        return "GONE", f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}"
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        code, output = run(tree, mutant.tests.split())
    finally:
        path.write_text(text)
    if code == FAILED:
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        why = lines[0][:150] if lines else ""
        # an ERROR is one before the test
        return ("killed" if why.startswith("FAILED") else "BROKEN"), why
    if code == -1:
        return "killed", "timeout"
    # neither passed nor failed: the mutant cannot be imported, or the tests cannot be found
    return ("SURVIVED", "") if code == 0 else ("BROKEN", output[-600:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", help="words of a mutant's name or file, or its number")
    parser.add_argument("--list", action="store_true", help="print the table only")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the unchanged tests first"
    )
    options = parser.parse_args(argv)
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(MUTANTS)
        if not options.only
        or any(w in f"{mutant.name} {mutant.file}" or w == str(number) for w in options.only)
    ]
    if options.list:
        for number, mutant in chosen:
            print(f"{number:3}  {mutant.file:28} {mutant.name}  <- {mutant.tests}")
        return 0
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import tests.libraries  # noqa: F401  once, and nothing of ours: a fork that tests a mutant imports that itself

    counts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants_") as name:
        tree = Path(name)
        copy(tree)
        if not options.no_baseline:
            named = sorted({test for _, mutant in chosen for test in mutant.tests.split()})
            code, output = run(tree, named)
            if code:
                print(f"the tests fail without any mutant, so nothing would be learned:\n{output}")
                return 2
        for number, mutant in chosen:
            start = time.monotonic()
            found, why = outcome(tree, mutant)
            counts.setdefault(found, []).append(mutant.name)
            print(
                f"{number:3} {found:8} {time.monotonic() - start:5.0f} s  {mutant.name}  {why}",
                flush=True,
            )
    print(", ".join(f"{len(names)} {found}" for found, names in counts.items()))
    for found, names in counts.items():
        if found != "killed":
            print(f"{found}:", *names, sep="\n  ")
    return int(set(counts) != {"killed"})


if __name__ == "__main__":
    sys.exit(main())
