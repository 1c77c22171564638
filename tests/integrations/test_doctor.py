"""``python -m ds_kfac doctor`` says what is wrong here, and what mends it."""

import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from filelock import FileLock
from torch.utils import cpp_extension

from ds_kfac.__main__ import main
from ds_kfac.diagnostics import doctor
from tests.ranks import ROOT

OP = "deepspeed_shm_comm"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Of no launcher, with an empty folder of compiled ops."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "DS_KFAC"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def said(capsys):
    def lines(status: int = 0) -> list[str]:
        assert main(["doctor"]) == status
        return capsys.readouterr().out.splitlines()

    return lines


def answer(lines: list[str], name: str) -> str:
    (line,) = (line for line in lines if line.startswith(f"  {name} "))
    return line.removeprefix(f"  {name}").strip()


def test_twelve_lines_and_an_answer(said):
    lines = said()
    assert len(lines) == 13 and lines[0] == "ds_kfac doctor: this environment will work"
    for name in ("Python 3.", "torch", "deepspeed", "ds_kfac", "numpy", "pydantic", "nvcc"):
        assert name in "\n".join(lines)


def no_compiler(patch, folder):
    patch.setattr(doctor.shutil, "which", lambda name: None)


def no_torch(patch, folder):
    patch.setattr(doctor, "version", lambda name: "2.6.0" if name == "torch" else "0.19.8")
    patch.setattr(doctor, "requires", lambda name: doctor.NEEDS)


def lock(patch, folder):
    patch.delattr(cpp_extension, "FileLock", raising=False)  # as before torch 2.14
    (folder / "fused_adam").mkdir()
    (folder / "fused_adam/lock").touch()


def not_writable(patch, folder):
    (folder / "file").touch()
    patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "file"))


def half_a_launcher(patch, folder):
    patch.setenv("RANK", "0")
    patch.setenv("WORLD_SIZE", "2")
    patch.delenv("MASTER_PORT", raising=False)


def no_startup(patch, folder):
    patch.setenv("DS_KFAC", "1")
    finders = [one for one in sys.meta_path if type(one).__name__ != "Finder"]
    patch.setattr(sys, "meta_path", finders)


@pytest.mark.parametrize(
    "damage, name, remedy",
    [
        (no_compiler, "compiler", "apt install g++"),
        (no_torch, "torch", "pip install 'torch>=2.8'"),
        (lock, "cache", "fused_adam/lock"),
        (not_writable, "cache", "TORCH_EXTENSIONS_DIR"),
        (half_a_launcher, "launcher", "MASTER_PORT"),
        (no_startup, "switched on", "pip install ds_kfac"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(damage, name, remedy, said, environment, tmp_path):
    damage(environment, tmp_path)
    lines = said(status=1)
    assert lines[0] == f"ds_kfac doctor: to be fixed: {name}"
    assert remedy in answer(lines, name).partition(" -> ")[2], lines


def test_a_lock_of_torch_2_14_counts_while_a_process_holds_it(said, environment, tmp_path):
    """Its file stays after every build."""
    environment.setattr(cpp_extension, "FileLock", FileLock, raising=False)
    locks = [tmp_path / op / "lock" for op in (OP, "fused_adam")]
    for path in locks:
        path.parent.mkdir()
        path.touch()
    assert answer(said(), "cache").endswith(", writable")
    with FileLock(locks[1]):  # of another object than the doctor's
        told = answer(said(), "cache")
    assert str(locks[1]) in told and str(locks[0]) not in told and "a build runs now" in told


def test_an_op_that_was_built_for_another_torch_is_not_compiled(said, environment, tmp_path):
    environment.setitem(deepspeed.ops.__compatible_ops__, OP, True)
    environment.delenv("TORCH_EXTENSIONS_DIR")
    environment.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = Path(torch.__file__).parent
    own = Path(cpp_extension._get_build_directory(OP, verbose=False))
    other = tmp_path / "torch_extensions/py39_cu999" / OP
    assert own.is_relative_to(tmp_path / "torch_extensions")
    for folder, of_torch in ((other, here), (own, tmp_path / "another" / "torch"), (own, here)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(f"ldflags = -shared -L{of_torch}/lib -lc10")
        (folder / f"{OP}.so").touch()
        built = (folder, of_torch) == (own, here)
        told = "compiled" if built else "will be compiled at the first start"
        assert answer(said(), OP).startswith(told), folder


def test_what_is_needed_and_tested_is_what_the_project_says(environment):
    asked = (ROOT / "pyproject.toml").read_text()
    assert len(doctor.NEEDS) == 2 and all(f'"{need}"' in asked for need in doctor.NEEDS)
    oldest, newest = doctor.TESTED_RANGES["deepspeed"]
    environment.setattr(doctor, "requires", lambda name: doctor.NEEDS)
    for has, where in (("0.17.0", "inside"), ("0.19.8+cu121", "inside"), ("0.20.1", "outside of")):
        environment.setattr(doctor, "version", lambda name, has=has: has)
        state = f"deepspeed {has}, {where} the tested range {oldest} to {newest}"
        assert tuple(doctor._package("deepspeed")) == (state, "")
