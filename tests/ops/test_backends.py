"""Which implementation runs, and how native libraries are built, found and refused."""

import fcntl
import shutil
from pathlib import Path

import pytest
import torch

from ds_kfac.config.keys import parse
from ds_kfac.ops import build, dispatch
from ds_kfac.ops.build import BuildError
from ds_kfac.ops.dispatch import Backend


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Implementations of these tests compute nothing: not checked. The process's choice is
    restored."""
    monkeypatch.setenv("DS_KFAC_CHECK_OPS", "0")
    yield
    monkeypatch.undo()
    dispatch.use(None, "cpu")


@pytest.fixture
def compiler():
    """Of C++; that of CUDA takes half a minute."""
    return shutil.which("g++") or pytest.skip("no g++")


def broken() -> dict:
    raise BuildError("no compiler in PATH")


def offer(monkeypatch, load) -> None:
    """A backend "fake" for the CPU, better than torch."""
    monkeypatch.setattr(dispatch, "BACKENDS", {"fake": Backend("cpu", load), **dispatch.BACKENDS})


def test_null_takes_the_best_per_op_and_torch_for_the_rest(monkeypatch):
    def ema_update_(*arguments):
        return None

    offer(monkeypatch, lambda: {"ema_update_": ema_update_})
    choice = dispatch.use(None, "cpu")
    name, implementation = choice.ops["ema_update_"]
    assert name == "fake" and implementation.__wrapped__ is ema_update_
    assert choice.ops["adam_step_"][0] == "torch"
    assert set(choice.ops) == set(dispatch.OPS) and not choice.missing


def test_what_runs_is_what_was_chosen(monkeypatch):
    called = []
    offer(monkeypatch, lambda: {"syrk_accumulate_": lambda *a, **k: called.append(a)})
    dispatch.use(None, "cpu")
    dispatch.syrk_accumulate_(torch.ones(1), torch.ones(1, 1))
    assert len(called) == 1
    dispatch.use("torch", "cpu")
    assert dispatch.syrk_accumulate_(torch.ones(1), torch.ones(1, 1)).tolist() == [2.0]
    assert len(called) == 1


def test_a_backend_that_cannot_run_is_passed_over_with_its_reason_or_refused_by_name(monkeypatch):
    offer(monkeypatch, broken)
    choice = dispatch.use(None, "cpu")
    assert {name for name, _ in choice.ops.values()} == {"torch"}
    assert "not fake: no compiler in PATH" in str(choice)
    with pytest.raises(
        ValueError, match=r'kfac.ops.backend "fake" cannot run here: no compiler in PATH'
    ):
        dispatch.use("fake", "cpu")


def test_a_backend_of_another_device_is_refused_by_name_and_not_mentioned_otherwise():
    with pytest.raises(ValueError, match="it is for cuda, not for meta"):
        dispatch.use("cuda", "meta")
    assert str(dispatch.use(None, "meta")) == f"torch ({', '.join(dispatch.OPS)})"


def test_every_backend_can_be_asked_for_and_no_other():
    for name in dispatch.BACKENDS:
        assert parse({"ops": {"backend": name}}).ops.backend == name
    with pytest.raises(ValueError, match=r"kfac\.ops\.backend"):
        parse({"ops": {"backend": "cuda9"}})


# building

SOURCE = 'extern "C" int answer() { return 42; }\n'
FLAGS = ["-shared", "-fPIC", "-x", "c++"]


def sources(folder: Path, text: str = SOURCE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "answer.cu").write_text(text)
    return folder


def test_a_library_is_compiled_once_and_again_when_sources_flags_change(compiler, tmp_path):
    def built(text: str = SOURCE, flags=FLAGS, finder=lambda: compiler) -> Path:
        return build.build(finder, flags, source=sources(tmp_path / "src", text), into=tmp_path)

    def nobody() -> str:
        raise AssertionError("compiled again")

    first = built()
    assert built(finder=nobody) == first
    assert len({first, built(SOURCE + "\n"), built(flags=["-O1", *FLAGS])}) == 3
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "src"]


def test_a_library_that_was_built_ahead_is_used(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    folder = sources(tmp_path / "src")
    ahead = build.build(lambda: compiler, FLAGS, source=folder, into=build.BUILT)
    assert build.build(broken, FLAGS, source=folder) == ahead


def test_errors_of_the_compiler_are_one_line(compiler, tmp_path):
    with pytest.raises(BuildError, match=r"failed: .*answer.cu.*error") as raised:
        build.build(
            lambda: compiler, FLAGS, source=sources(tmp_path / "src", "not C++"), into=tmp_path
        )
    assert "\n" not in str(raised.value)


def test_a_lock_that_is_never_given_up_only_delays(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    folder = sources(tmp_path / "src")
    library = build.build(lambda: compiler, FLAGS, source=folder, into=tmp_path)
    library.unlink()
    with library.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build.build(lambda: compiler, FLAGS, source=folder, into=tmp_path).exists()


def test_a_folder_that_cannot_be_written_is_a_reason(compiler, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write to"):
        build.build(lambda: compiler, FLAGS, source=sources(tmp_path), into=tmp_path / "file" / "x")
