"""Op libraries: how they are compiled, found, built ahead of time and refused."""

import fcntl
import shutil
import stat
from pathlib import Path

import pytest

from ds_kfac.ops import build
from ds_kfac.ops.build import BuildError, installed

SOURCE = 'extern "C" int answer() { return 42; }\n'
FLAGS = ["-shared", "-fPIC", "-x", "c++"]


def nobody() -> str:
    raise AssertionError("compiled again")


@pytest.fixture(autouse=True)
def without_compilers(monkeypatch, tmp_path):
    """Nothing in PATH, nothing built."""
    found = shutil.which("g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return found


@pytest.fixture
def compile_(tmp_path, without_compilers, monkeypatch):
    """Build a library of one function by the compiler of C++; that of CUDA takes half a minute."""
    compiler = without_compilers or pytest.skip("no g++")
    monkeypatch.setenv("PATH", str(Path(compiler).parent))

    def built(text=SOURCE, flags=FLAGS, finder=lambda: compiler, into=tmp_path / "own") -> Path:
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src/answer.cu").write_text(text)
        return build.build(finder, flags, source=tmp_path / "src", into=into)

    return built


@pytest.fixture
def nvcc(without_compilers, tmp_path):
    """One that writes its arguments where a library should be."""
    path = tmp_path / "nvcc"
    listing = '[ "$1" = --list-gpu-code ] && echo sm_80 sm_90 sm_100 && exit'
    path.write_text(f'#!/bin/sh\n{listing}\nfor last in "$@"; do :; done\necho "$0 $@" > "$last"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_library_is_compiled_once_and_again_when_sources_flags_change(compile_, tmp_path):
    first = compile_()
    assert compile_(finder=nobody) == first
    assert len({first, compile_(SOURCE + "\n"), compile_(flags=["-O1", *FLAGS])}) == 3
    assert not [path for path in (tmp_path / "own").iterdir() if path.is_dir()]
    assert compile_(into=build.BUILT) == compile_(finder=nobody, into=None), "built ahead"


def test_a_lock_that_is_never_given_up_only_delays(compile_, monkeypatch):
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    library = compile_()
    library.unlink()
    with library.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compile_().exists()


def test_what_cannot_be_built_or_loaded_is_a_reason(compile_, nvcc, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"\A.*failed: .*answer.cu.*error.*\Z"):  # one line
        compile_("not C++")
    with pytest.raises(BuildError, match="cannot write to"):
        compile_(into=tmp_path / "file" / "x")
    with pytest.raises(RuntimeError, match="its library does not load"):
        build.load("90a")
    nvcc.unlink()
    with pytest.raises(RuntimeError, match=r"no nvcc \(CUDA_HOME, PATH, /usr/local/cuda\)"):
        build.load("100a")


def test_what_is_built_ahead_is_used_where_it_runs_and_needs_no_compiler(nvcc):
    built = build.build_ahead(build.BUILT, {"DS_KFAC_BUILD_OPS": "1"})
    assert sorted(build.BUILT.iterdir()) == sorted(built)
    nvcc.unlink()
    assert {installed(name) for name in ("80", "90a", "100")} == set(built), "it knows no 120"
    assert installed("86") == installed("80") and installed("103") == installed("100")
    assert "arch=compute_90a,code=sm_90a" in installed("90a").read_text()
    assert not any(installed(other) for other in ("75", "90", "110", "121"))


def test_the_environment_chooses_what_is_built_ahead(nvcc, tmp_path, capsys):
    def built(**environment: str) -> int:
        return len(build.build_ahead(tmp_path / "ahead", environment))

    assert built() == built(DS_KFAC_BUILD_OPS="0") == 0
    assert built(DS_KFAC_BUILD_OPS="1", DS_KFAC_BUILD_CUDA="0") == 0
    assert built(DS_KFAC_BUILD_OPS="1") == built(DS_KFAC_BUILD_CUDA="1") == 3
    nvcc.unlink()
    assert built(DS_KFAC_BUILD_OPS="1") == 0
    assert "kfac_cuda: no nvcc" in capsys.readouterr().out
    with pytest.raises(BuildError, match="DS_KFAC_BUILD_CUDA=1, but kfac_cuda cannot be built"):
        built(DS_KFAC_BUILD_CUDA="1")


def test_architectures_are_those_of_torch_s_variable():
    def wanted(text: str) -> list[str]:
        return build.wanted_architectures({"TORCH_CUDA_ARCH_LIST": text})

    assert wanted("") == build.wanted_architectures({}) == []
    assert wanted("8.0;9.0+PTX 10.0a;8.0") == ["80", "90a", "100a"]
    for wrong in ("7.5", "Ampere", "8.0;90"):
        with pytest.raises(BuildError, match=r"expected capabilities from 8.0 on"):
            wanted(wrong)
