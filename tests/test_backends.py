"""Which implementation runs, and how native libraries are built, found and refused."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_kfac.config import parse
from ds_kfac.ops import backends, build, cpp, dispatch
from ds_kfac.ops.backends import Backend
from ds_kfac.ops.build import BuildError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def restored():
    """The process's choice, as it was."""
    yield
    backends.use(None, "cpu")


@pytest.fixture
def compiler():
    try:
        return build.compiler()
    except BuildError as problem:
        pytest.skip(str(problem))


def broken() -> dict:
    raise BuildError("no C++ compiler in PATH")


def test_null_takes_the_best_per_op_and_torch_for_the_rest(compiler):
    choice = backends.use(None, "cpu")
    name, implementation = choice.ops["ema_update_"]
    assert name == "cpp" and implementation.__wrapped__ is cpp.ema_update_
    assert choice.ops["count_accumulate_"][0] == "torch"
    assert set(choice.ops) == set(backends.OPS) and not choice.missing


def test_what_runs_is_what_was_chosen(monkeypatch):
    called = []
    monkeypatch.setitem(
        backends.BACKENDS, "cpp", Backend("cpu", lambda: {"eigen_scale": lambda *a, **k: called.append(a)})
    )
    backends.use(None, "cpu")
    dispatch.eigen_scale(torch.ones(1, 1), torch.ones(1), torch.ones(1), 0.1)
    assert len(called) == 1
    backends.use("torch", "cpu")
    assert dispatch.eigen_scale(torch.ones(1, 1), torch.ones(1), torch.ones(1), 1.0).tolist() == [[0.5]]
    assert len(called) == 1


def test_a_backend_that_cannot_run_is_passed_over_with_its_reason_or_refused_by_name(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "cpp", Backend("cpu", broken))
    choice = backends.use(None, "cpu")
    assert {name for name, _ in choice.ops.values()} == {"torch"}
    assert "not cpp: no C++ compiler in PATH" in str(choice)
    with pytest.raises(ValueError, match=r'kfac.ops.backend "cpp" cannot run here: no C\+\+ compiler in PATH'):
        backends.use("cpp", "cpu")


def test_a_backend_of_another_device_is_refused_by_name_and_not_mentioned_otherwise():
    with pytest.raises(ValueError, match="it is for cpu, not for meta"):
        backends.use("cpp", "meta")
    assert str(backends.use(None, "meta")) == f"torch ({', '.join(backends.OPS)})"


def test_every_backend_can_be_asked_for():
    for name in backends.BACKENDS:
        assert parse({"ops": {"backend": name}}).ops.backend == name
    with pytest.raises(ValueError, match=r"kfac\.ops\.backend"):
        parse({"ops": {"backend": "cuda9"}})


def test_ordinary_tensors_are_not_refused(compiler):
    sum_P, x = torch.zeros(6), torch.ones(4, 3)
    cpp.syrk_accumulate_(sum_P, x.bfloat16())
    assert sum_P.tolist() == [4.0] * 6
    cpp.ema_update_([sum_P], [sum_P.clone()], [torch.ones(())], [torch.zeros(())], [0.9])
    (matrix,) = cpp.symmetric_unpack_from(sum_P.half(), [0], [3])
    cpp.symmetric_pack_into_(sum_P, [0], [matrix[:3]])
    cpp.similarity([sum_P], [sum_P], [sum_P], [3])
    cpp.eigen_scale(x.T, torch.ones(3), torch.ones(4), 0.1)
    cpp.corrected_scale_dot(x, x.clone(), 0.9, 1.0, 0.1, exponent=0.5)


@pytest.mark.parametrize("start", [-1, 1])
def test_triangles_outside_of_the_buffer_are_refused(compiler, start):
    with pytest.raises(ValueError, match=f"a triangle of side 3 at {start} is outside of 6 elements"):
        cpp.symmetric_pack_into_(torch.zeros(6), [start], [torch.zeros(3, 3)])
    with pytest.raises(ValueError, match=f"a triangle of side 3 at {start} is outside of 6 elements"):
        cpp.symmetric_unpack_from(torch.zeros(6), [start], [3])


# building

SOURCE = 'extern "C" int answer() { return 42; }\n'
FLAGS = ["-shared", "-fPIC"]


def sources(folder: Path, text: str = SOURCE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "answer.cpp").write_text(text)
    return folder


def test_a_library_is_compiled_once_and_again_when_sources_flags_or_processor_change(compiler, tmp_path):
    def built(text: str = SOURCE, flags=FLAGS, target: str = "", finder=lambda: compiler) -> Path:
        return build.build(
            "answer", finder, flags, target=target, sources=sources(tmp_path / "src", text), into=tmp_path
        )

    def nobody() -> str:
        raise AssertionError("compiled again")

    first = built()
    assert built(finder=nobody) == first
    assert len({first, built(SOURCE + "\n"), built(flags=[*FLAGS, "-O1"]), built(target="another")}) == 4
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "src"]


def test_a_library_that_was_built_ahead_is_used(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    folder = sources(tmp_path / "src")
    ahead = build.build("answer", lambda: compiler, FLAGS, sources=folder, into=build.BUILT)
    assert build.build("answer", broken, FLAGS, sources=folder) == ahead


def test_errors_of_the_compiler_are_one_line(compiler, tmp_path):
    with pytest.raises(BuildError, match=r"failed: .*answer.cpp.*error") as raised:
        build.build("answer", lambda: compiler, FLAGS, sources=sources(tmp_path / "src", "not C++"), into=tmp_path)
    assert "\n" not in str(raised.value)


def test_without_a_compiler_there_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.compiler()


def test_a_lock_that_is_never_given_up_only_delays(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    folder = sources(tmp_path / "src")
    library = build.build("answer", lambda: compiler, FLAGS, sources=folder, into=tmp_path)
    library.unlink()
    with library.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build.build("answer", lambda: compiler, FLAGS, sources=folder, into=tmp_path).exists()


def test_a_folder_that_cannot_be_written_is_a_reason(compiler, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write to"):
        build.build("answer", lambda: compiler, FLAGS, sources=sources(tmp_path), into=tmp_path / "file" / "x")


def test_sources_compile_without_warnings(compiler, tmp_path):
    flags = [*build.CPU_FLAGS, "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    build.build("cpu", lambda: compiler, flags, into=tmp_path)


def test_cpp_ops_are_clean_under_address_and_undefined_behaviour_sanitizers(compiler, tmp_path):
    runtime = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(os.path.isabs(path) for path in runtime):
        pytest.skip(f"{compiler} has no sanitizers: {runtime}")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "DS_KFAC_CXX_FLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all",
    }
    command = [sys.executable, "-m", "tests.sanitized_ops"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "bad access caught" in done.stdout
