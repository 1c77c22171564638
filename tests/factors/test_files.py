"""What is read of factors is what was written, or an error that names the file."""

import errno
import json
from pathlib import Path

import pytest

from ds_kfac.factors import files
from ds_kfac.factors.files import Factors, FactorsError
from tests.close import exact
from tests.factors.test_fit import Sequences, fit, sequences

SHARD = "factors-00000.safetensors"


@pytest.fixture
def made(tmp_path) -> Path:
    fit(Sequences(), sequences(1), out=tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize("kept", [5, -1, None])
def test_a_shard_that_is_cut_off_or_missing_is_named(kept, made):
    (made / SHARD).write_bytes((made / SHARD).read_bytes()[:kept])
    if kept is None:
        (made / SHARD).unlink()
    with pytest.raises(FactorsError, match=rf"{SHARD}: head/A cannot be read"):
        Factors.load(made).factor("head", "A")
    with pytest.raises(FactorsError, match="no layer 'twise'; there are layers such as twice"):
        Factors.load(made).factor("twise", "A")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2, but this ds_kfac reads version 3"),
        (None, "not written by ds_kfac"),
    ],
)
def test_an_index_of_something_else_is_refused(change, said, made):
    path = made / "index.json"
    header = json.loads(path.read_text())
    path.write_text("{" if change is None else json.dumps({**header, **change}))
    with pytest.raises(FactorsError, match=said):
        Factors.load(made)


def test_a_full_disk_leaves_nothing_that_loads(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.safetensors(), "save_file", full)
    with pytest.raises(FactorsError, match=r"could not be written .*No space left"):
        fit(Sequences(), sequences(1), out=tmp_path)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.safetensors"))
    monkeypatch.undo()
    fit(Sequences(), sequences(1), out=tmp_path)


def test_factors_that_are_there_are_replaced(made, tmp_path):
    expected = fit(Sequences(), sequences(2), out=tmp_path / "new")
    found = fit(Sequences(), sequences(2), out=made, corrected=False)
    exact(found.factor("head", "G"), expected.factor("head", "G"))
    assert not found.has("head", "corrected")


def test_a_run_that_is_killed_leaves_nothing_that_loads(made):
    def stops():
        yield sequences(1)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(Sequences(), stops(), out=made, corrected=False)
    with pytest.raises(FactorsError, match="not finished"):
        Factors.load(made)


def test_a_folder_that_cannot_be_written_is_said_before_the_pass(tmp_path):
    def untouched():
        raise AssertionError("the data was read")
        yield

    (tmp_path / SHARD).mkdir()
    with pytest.raises(FactorsError, match="could not be written"):
        fit(Sequences(), untouched(), out=tmp_path, corrected=False)
