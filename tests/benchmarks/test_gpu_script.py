"""benchmarks/gpu.sh brings back what it measured: when it ends, when a part fails, when it is cut
short, without DeepSpeed, pip or a network."""

import csv
import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.__main__ import NEWTON_SCHULZ, OPS, SOLVERS

ROOT = Path(__file__).parents[2]
SCRIPT = ["bash", str(ROOT / "benchmarks" / "gpu.sh")]
ITEMS = {
    "A": ["machine", "ops_check", "ops", "steps", "modes", "others", "sanitizer"],
    "B": ["machine", "costs", "cholesky_inverse", "iteration", "eigh", "eigh_batched"],
    "C": ["machine", "newton_schulz"],
    "D": ["machine", "sweep", "goals", "goals_2048", "fp32", "models"],
    "E": ["machine", "step"],
    "F": ["machine", "corpus", "gpu_lm"],
    "G": ["machine", "cifar"],
    "H": ["machine", "tokens"],
    "I": ["machine", "modes", "coarse", "shared", "trainer", "kills"],
    "J": ["machine", "float16", "bfloat16", "memcheck"],
}
MISSING = ("deepspeed", "hjson", "pydantic", "pip", "_distutils_hack", "sitecustomize")


@pytest.fixture
def container(tmp_path) -> dict[str, str]:
    """An environment whose Python has torch and pytest, but none of ``MISSING``."""
    packages, python = tmp_path / "packages", tmp_path / "python"
    packages.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(MISSING) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    write(python, f'exec {sys.executable} -S "$@"')
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    own = {
        "PYTHON": str(python),
        "PYTHONPATH": str(packages),
        "OUT": str(tmp_path / "out"),
        "SIZES": "small",
    }
    return {**kept, **own, "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}


def write(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def come_back(out: Path, part: str) -> tuple[dict[str, dict], dict[str, str]]:
    """Items by name, and files by name, of the archive; the rows are outside of it too."""
    with tarfile.open(out / f"gpu_{part}.tgz") as archive:
        files = {
            Path(name).name: archive.extractfile(name).read().decode(errors="replace")
            for name in archive.getnames()
            if "." in name
        }
    assert files["items.csv"] == (out / f"gpu_{part}.csv").read_text()
    assert not (out / f"gpu_{part}").exists()
    return {row["item"]: row for row in csv.DictReader(io.StringIO(files["items.csv"]))}, files


@pytest.mark.parametrize("part", ITEMS)
def test_every_item_is_a_row_and_a_failed_one_is_not_the_end(tmp_path, part):
    wrong = ITEMS[part][-1].replace("_", ".").removesuffix(".2048")  # in the item's command
    python = write(
        tmp_path / "python",
        f'echo "$*" | grep -q "{wrong}" && echo went wrong && exit 3\necho did it',
    )
    environment = os.environ | {
        "PYTHON": str(python),
        "OUT": str(tmp_path / "out"),
        "KEEP": str(tmp_path / "keep"),
    }
    done = subprocess.run(
        [*SCRIPT, part], env=environment, text=True, capture_output=True, timeout=60
    )
    items, files = come_back(tmp_path / "out", part)
    assert list(items) == ITEMS[part] and done.returncode == 1
    assert (
        items[ITEMS[part][-1]]["result"] == "failed (3)" and items["machine"]["result"] == "passed"
    )
    assert all(row["last line"] == files[f"{name}.log"].strip() for name, row in items.items())


def test_every_op_that_is_named_can_be_timed():
    text = Path(SCRIPT[1]).read_text().replace("\\\n", " ")
    named = set(shlex.split(re.search(r"for op in (.+?); do", text)[1]))
    for words in re.findall(r"--ops (.+)", text):
        named |= set(itertools.takewhile(lambda word: word[0] not in "-$", shlex.split(words)))
    assert (
        {"eigh", "newton schulz", "syrk_accumulate_", "adam_step_"}
        <= named
        <= {*OPS, *SOLVERS, NEWTON_SCHULZ}
    )


def test_an_unknown_part_is_refused():
    done = subprocess.run([*SCRIPT, "Z"], text=True, capture_output=True)
    assert done.returncode == 2 and "usage: gpu.sh A | B | C | D | E" in done.stdout


@pytest.mark.parametrize("part", ITEMS)
def test_a_dry_run_says_what_would_run_and_changes_nothing(tmp_path, part):
    out = tmp_path / "out"
    (out / f"gpu_{part}").mkdir(parents=True)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OUT": str(out),
        "DRY_RUN": "1",
        "SIZES": "full",
    }
    done = subprocess.run(
        [*SCRIPT, part, *(["b"] * (part == "F"))], env=environment, text=True, capture_output=True
    )
    items = re.findall(r"^(\w+), at most \d+ s: ", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and items == ITEMS[part], done.stdout + done.stderr
    assert list(out.iterdir()) == [out / f"gpu_{part}"]
    if part == "F":
        assert "b_kfacadamw_lr0.002_seed0" in done.stdout and "183.5 M tokens a run" in done.stdout


def test_no_item_is_begun_without_time_and_none_runs_longer_than_it_has(tmp_path):
    python = write(tmp_path / "python", 'case "$*" in *newton*) sleep 60 ;; esac')
    environment = os.environ | {
        "PYTHON": str(python),
        "OUT": str(tmp_path / "out"),
        "SECONDS_IN_ALL": "6",
    }
    assert subprocess.run([*SCRIPT, "C"], env=environment, timeout=30).returncode == 1
    assert come_back(tmp_path / "out", "C")[0]["newton_schulz"]["result"].startswith(
        "not finished in "
    )
    environment["SECONDS_IN_ALL"] = "0"
    subprocess.run([*SCRIPT, "B"], env=environment, timeout=30)
    assert {row["result"] for row in come_back(tmp_path / "out", "B")[0].values()} == {"no time"}


def cut(environment: dict[str, str], how: signal.Signals) -> int:
    """Part B, ended in its third item, once a row of that was measured."""
    out = Path(environment["OUT"])
    process = subprocess.Popen(
        [*SCRIPT, "B"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    table, deadline = out / "gpu_B" / "cholesky_inverse.csv", time.monotonic() + 120
    while not (table.exists() and table.read_text().count("\n") > 1):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(how)
    return process.wait(timeout=30)


def test_a_run_that_is_cut_short_brings_back_what_it_measured(container):
    assert cut(container, signal.SIGTERM) == 143
    items, files = come_back(Path(container["OUT"]), "B")
    assert [row["result"] for row in items.values()] == ["passed", "passed", "cut short"]
    assert "pydantic MISSING: ModuleNotFoundError" in files["machine.log"] and files[
        "machine.log"
    ].startswith("torch 2")
    rows = list(csv.DictReader(io.StringIO(files["cholesky_inverse.csv"])))
    assert rows and all(float(row["median_ms"]) > 0 for row in rows)


def test_after_a_kill_everything_lies_in_the_folder(container):
    assert cut(container, signal.SIGKILL) == -signal.SIGKILL
    out = Path(container["OUT"])
    assert (out / "gpu_B.csv").read_text().count("passed") == 2
    assert {"machine.log", "cholesky_inverse.csv"} <= {
        path.name for path in (out / "gpu_B").iterdir()
    }


def test_without_deepspeed_ops_are_tested_and_steps_are_a_row_that_says_so(container):
    subprocess.run([*SCRIPT, "E"], env=container, timeout=100)
    items, _ = come_back(Path(container["OUT"]), "E")
    assert items["step"]["result"] == "failed (1)"
    assert items["step"]["last line"] == "ModuleNotFoundError: No module named 'deepspeed'"
    command = [
        container["PYTHON"],
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_ops.py",
        "-k",
        "adam",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=container, text=True, capture_output=True, timeout=100
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_missing_packages_are_taken_from_wheels(container, tmp_path):
    """Without pip: a wheel is a zip file."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import zipfile\nwith zipfile.ZipFile('deepspeed-0-py3-none-any.whl', 'w') as file:\n"
            "    file.writestr('deepspeed/__init__.py', '__version__ = \"from the wheel\"')",
        ],
        cwd=wheels,
        check=True,
    )
    subprocess.run([*SCRIPT, "E"], env=container | {"WHEELS": str(wheels)}, timeout=100)
    assert "deepspeed from the wheel\n" in come_back(Path(container["OUT"]), "E")[1]["machine.log"]


@pytest.mark.parametrize("part", ["G", "H"])
def test_a_part_of_several_calls_goes_on_in_its_folder_and_brings_back_its_tables(tmp_path, part):
    """The stand-in adds a row a call, and leaves something large to go on from."""
    program = """
import sys
from pathlib import Path
if "--out" in sys.argv:
    own = Path(sys.argv[sys.argv.index("--out") + 1]) / "some"
    (own / "run.saved").mkdir(parents=True, exist_ok=True)
    (own / "run.saved" / "state.json").write_text("large")
    with open(own / "rows.csv", "a") as file:
        print("row", file=file)
    left = float(sys.argv[sys.argv.index("--seconds") + 1])
    assert 0 < left <= 20, left
    print("ran")
"""
    (tmp_path / "program.py").write_text(program)
    python = write(tmp_path / "python", f'exec {sys.executable} "{tmp_path}/program.py" "$@"')
    own = {
        "PYTHON": str(python),
        "OUT": str(tmp_path / "out"),
        "KEEP": str(tmp_path / "keep"),
        "SECONDS_IN_ALL": "40",
    }
    for call in (1, 2):
        assert subprocess.run([*SCRIPT, part], env=os.environ | own, timeout=30).returncode == 0
        items, files = come_back(tmp_path / "out", part)
        assert files["rows.csv"] == call * "row\n" and "state.json" not in files
        assert items[ITEMS[part][-1]]["last line"] == "ran"
    assert (tmp_path / "keep" / part / "some" / "run.saved" / "state.json").exists()
