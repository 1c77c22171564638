"""What is read of factors is what was written, or an error that names the file."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit
from tests.factors.test_fit import Sequences, sequences

SHARD = "factors-00000.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("factors") / "made"
    fit(Sequences(), sequences(2), out=folder, progress=False)
    return folder


@pytest.mark.parametrize("kept", [0, 5, 0.3, -1])
def test_a_shard_that_is_cut_off_is_named(kept, made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    path = tmp_path / "made" / SHARD
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(FactorsError, match=rf"{SHARD}: head/A is damaged"):
        Factors.load(tmp_path / "made").factor("head", "A")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2; this ds_kfac reads 3"),
        ({"format": "other"}, "version None; this ds_kfac reads 3"),
        (None, "not written by ds_kfac"),
    ],
)
def test_an_index_of_something_else_is_refused(change, said, made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    path = tmp_path / "made" / "index.json"
    header = json.loads(path.read_text())
    path.write_text("{" if change is None else json.dumps({**header, **change}))
    with pytest.raises(FactorsError, match=said):
        Factors.load(tmp_path / "made")


class Untouched(list):
    def __iter__(self):
        raise AssertionError("the data was read")


def test_a_folder_that_cannot_be_written_is_said_before_the_pass():
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        with pytest.raises(FactorsError, match=r"could not be written .*[Pp]ermission denied"):
            fit(Sequences(), Untouched(sequences(2)), out=folder, progress=False)
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(folder)
