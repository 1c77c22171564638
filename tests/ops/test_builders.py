"""Op libraries: what can be built, and what is built ahead of time."""

import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ds_kfac.ops import build
from ds_kfac.ops.build import BuildError, installed


@pytest.fixture
def without_compilers(monkeypatch, tmp_path):
    """Nothing in PATH, nothing built."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ds_kfac.ops.build.NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))


@pytest.fixture
def compiler(without_compilers, monkeypatch, tmp_path):
    """A nvcc that writes its arguments where a library should be."""
    path = tmp_path / "nvcc"
    listing = '[ "$1" = --list-gpu-code ] && echo sm_80 sm_90 sm_100 && exit'
    path.write_text(f'#!/bin/sh\n{listing}\nfor last in "$@"; do :; done\necho "$0 $@" > "$last"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_without_a_compiler_it_says_why(without_compilers):
    with pytest.raises(RuntimeError, match=r"no nvcc \(CUDA_HOME, PATH, /usr/local/cuda\)"):
        build.load("90a")


def test_a_compilation_is_said_once(compiler, caplog):
    with caplog.at_level("INFO", logger="ds_kfac"):
        for _ in range(2):
            build.build(lambda: build.NVCC, [])
    said = [
        record.getMessage()
        for record in caplog.records
        if "compiling csrc/cuda" in record.getMessage()
    ]
    assert len(said) == 1 and "DS_KFAC_BUILD_OPS=1" in said[0]


def test_what_is_built_ahead_is_used_where_it_runs_and_needs_no_compiler(compiler, tmp_path):
    built = build.build_ahead(build.BUILT, {"DS_KFAC_BUILD_OPS": "1"})
    assert len(built) == len(["80", "90a", "100"]), "nvcc does not know 120"
    assert sorted(build.BUILT.iterdir()) == sorted(built)
    (tmp_path / "nvcc").unlink()
    assert installed("86") == installed("80") != installed("90a") and {
        installed("80"),
        installed("90a"),
    } <= {*built}
    assert "arch=compute_90a,code=sm_90a" in installed("90a").read_text()
    assert installed("103") == installed("100")
    assert not any(installed(other) for other in ("75", "90", "110", "121"))


def test_the_environment_chooses_what_is_built_ahead(compiler, tmp_path):
    def built(**environment: str) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return [path.name.split("-")[0] for path in build.build_ahead(folder, environment)]

    assert built() == built(DS_KFAC_BUILD_OPS="0") == []
    assert set(built(DS_KFAC_BUILD_OPS="1")) == set(built(DS_KFAC_BUILD_CUDA="1")) == {"cuda"}
    assert built(DS_KFAC_BUILD_OPS="1", DS_KFAC_BUILD_CUDA="0") == []


def test_what_cannot_be_built_is_passed_over_or_an_error_if_it_was_asked_for_by_name(
    compiler, capsys, tmp_path
):
    (tmp_path / "nvcc").unlink()
    assert build.build_ahead(tmp_path / "ahead", {"DS_KFAC_BUILD_OPS": "1"}) == []
    assert "kfac_cuda: no nvcc" in capsys.readouterr().out
    with pytest.raises(
        BuildError, match="DS_KFAC_BUILD_CUDA=1, but kfac_cuda cannot be built: no nvcc"
    ):
        build.build_ahead(tmp_path / "ahead", {"DS_KFAC_BUILD_CUDA": "1"})


def test_architectures_are_those_of_torch_s_variable():
    def wanted(text: str) -> list[str]:
        return build.wanted_architectures({"TORCH_CUDA_ARCH_LIST": text})

    assert wanted("") == build.wanted_architectures({}) == []
    assert wanted("8.0;9.0+PTX 10.0a;8.0") == ["80", "90a", "100a"]
    for wrong in ("7.5", "Ampere", "8.0;90"):
        with pytest.raises(
            BuildError,
            match=r'TORCH_CUDA_ARCH_LIST has "\w+(\.\d)?"; expected capabilities from 8.0 on',
        ):
            wanted(wrong)


def test_a_library_that_does_not_load_is_a_reason(compiler):
    with pytest.raises(RuntimeError, match="its library does not load"):
        build.load("90a")


def test_a_source_distribution_has_the_sources(tmp_path):
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "sdist",
        "-d",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {str(file.relative_to(root)) for file in (root / "csrc").rglob("*.c*")} <= names
