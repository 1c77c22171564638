"""What is read of factors is what was written, or an error that names the file; what of a folder is whose."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ds_kfac.factors import progress
from ds_kfac.factors.files import KINDS, Factors, FactorsError
from ds_kfac.factors.fitting import fit
from ds_kfac.factors.progress import named
from tests.close import exact
from tests.factors.test_fit import Sequences, Stops, sequences
from tests.ranks import ROOT

SHARDS = ("factors-00000.safetensors", "corrected-00000.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("factors") / "made"
    fit(Sequences(), sequences(2), out=folder, progress=False)
    return folder


def everything(folder: Path) -> dict[str, torch.Tensor]:
    """All that a folder holds."""
    found, tensors = Factors.load(folder), {}
    for name in found:
        for side in "AG":
            basis = found.eigenbasis(name, side)
            tensors |= {f"{name}/{side}": found.factor(name, side), f"{name}/{side}/values": basis.values}
            tensors[f"{name}/{side}/vectors"] = basis.vectors[0]
            tensors[f"{name}/{side}/count"] = torch.tensor(found.count(name, side))
        tensors |= {f"{name}/{kind}": found.corrected(name, kind) for kind in KINDS}
    return tensors


@pytest.mark.parametrize("file", [*SHARDS, "index.json"])
def test_a_flipped_byte_is_never_read_as_a_number(file, made, tmp_path):
    expected, whole, refused = everything(made), (made / file).read_bytes(), 0
    shutil.copytree(made, tmp_path / "made")
    places = range(8, len(whole), max(1, len(whole) // 200))
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        (tmp_path / "made" / file).write_bytes(damaged)
        try:
            found = everything(tmp_path / "made")
        except FactorsError as problem:
            assert file in str(problem), problem
            refused += 1
        else:
            for name, tensor in expected.items():
                exact(found[name], tensor)
    # but for names that nothing asks for, and the padding of a safetensors header
    assert refused > 0.9 * len(places), (refused, len(places))


@pytest.mark.parametrize("file", SHARDS)
@pytest.mark.parametrize("kept", [0, 5, 0.3, -1])
def test_a_shard_that_is_cut_off_is_named(file, kept, made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    path = tmp_path / "made" / file
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(FactorsError, match=rf"{file}: damaged, or not of ds_kfac .*remove the folder and compute it"):
        everything(tmp_path / "made")


@pytest.mark.parametrize("key", ["layers", "counts", "weight_map", "shards", "crc32", "settings"])
def test_an_index_without_a_key_is_damaged(key, made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    path = tmp_path / "made" / "index.json"
    header = json.loads(path.read_text())
    del header[key]
    path.write_text(json.dumps(header))
    with pytest.raises(FactorsError, match=r"index\.json: wrong checksum: damaged, or changed"):
        Factors.load(tmp_path / "made")


def test_a_shard_of_other_factors_is_refused(made, tmp_path):
    fit(Sequences(), sequences(3), out=tmp_path / "other", progress=False)
    shutil.copy(made / SHARDS[0], tmp_path / "other")
    with pytest.raises(FactorsError, match=rf"{SHARDS[0]}: is of other factors than .*index\.json"):
        Factors.load(tmp_path / "other").factor("head", "A")


def test_sums_of_a_stopped_run_that_are_damaged_do_not_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SAVE_SECONDS", -1.0)
    data = sequences(3)
    with pytest.raises(KeyboardInterrupt):
        fit(Sequences(), Stops(data, 2), out=tmp_path, progress=False)
    path = next(tmp_path.glob("partial-*"))
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(FactorsError, match=r"partial-.*: damaged"):
        fit(Sequences(), data, out=tmp_path, progress=False)
    (tmp_path / progress.PROGRESS).write_text('{"settings": {}, "save": 1}')
    with pytest.raises(FactorsError, match=r"progress\.json: damaged .*remove the folder and start again"):
        fit(Sequences(), data, out=tmp_path, progress=False)


# whose a finished folder is


@pytest.mark.parametrize("other", [sequences(3), sequences(3)[1:], sequences(2)[::-1], []], ids=len)
def test_a_finished_folder_of_other_data_is_refused(other, made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    same = fit(Sequences(), sequences(2), out=tmp_path / "made", progress=False)
    exact(same.factor("head", "A"), Factors.load(made).factor("head", "A"))
    with pytest.raises(FactorsError, match="holds factors of other data, or of its batches in another order"):
        fit(Sequences(), other, out=tmp_path / "made", progress=False)


FACTOR = 2.0


def scaled(by: float):
    return lambda own, batch: own(**batch) * by


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, own, batch):
        return own(**batch) * self.by


def uses_a_global(own, batch):
    return own(**batch) * FACTOR


def losses() -> dict:
    return {
        "lambda": lambda own, batch: own(**batch),
        "lambda of another constant": lambda own, batch: own(**batch) * 3,
        "closure": scaled(1.0), "closure of another value": scaled(2.0),
        "object": Scaled(1.0), "object of another value": Scaled(2.0),
        "global": uses_a_global, "partial": functools.partial(uses_a_global), "default": None,
    }  # fmt: skip


def test_losses_are_told_apart_by_what_they_do(tmp_path, monkeypatch):
    names = {case: named(loss) for case, loss in losses().items()}
    assert len(set(names.values())) == len(names), names
    assert names == {case: named(loss) for case, loss in losses().items()}
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert named(uses_a_global) != names["global"]
    fit(Sequences(), sequences(2), scaled(1.0), out=tmp_path, progress=False)
    fit(Sequences(), sequences(2), scaled(1.0), out=tmp_path, progress=False)
    with pytest.raises(FactorsError, match=r"holds factors of other settings \(loss was .*scaled"):
        fit(Sequences(), sequences(2), scaled(2.0), out=tmp_path, progress=False)


def test_a_loss_has_the_same_name_in_every_process():
    code = "from tests.factors.test_files import losses, named; print({k: named(x) for k, x in losses().items()})"
    said = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert said[0] == said[1] == f"{ {k: named(x) for k, x in losses().items()} }\n"


# before and while it runs


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


@pytest.mark.parametrize("data", [None, 7])
def test_what_is_no_data_is_named(data, tmp_path):
    with pytest.raises(FactorsError, match=f"data: got {type(data).__name__}; must be something to iterate"):
        fit(Sequences(), data, out=tmp_path, progress=False)


@pytest.mark.parametrize("model", [None, [1]])
def test_what_is_no_model_is_named(model, tmp_path):
    with pytest.raises(FactorsError, match=f"model: got {type(model).__name__}; must be an nn.Module"):
        fit(model, sequences(1), out=tmp_path, progress=False)


STOPPED = """
import os, signal, sys
from ds_kfac.__main__ import main
from ds_kfac.factors import progress
from tests.factors import test_convert
progress.SAVE_SECONDS = {seconds}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
plain = test_convert.data
def data(rank, ranks):
    for number, batch in enumerate(plain(rank, ranks)):
        if number == {at}:
            os.kill(os.getpid(), signal.SIGINT)
        yield batch
class Batches(list):
    def __iter__(self):
        return data(0, 1)
test_convert.data = lambda rank, ranks: Batches(plain(rank, ranks))
names = "tests.factors.test_convert"
sys.exit(main(["factors", "--model", names + ":Net", "--data", names + ":data", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("seconds", [-1.0, 300.0])
def test_a_command_that_is_stopped_says_that_it_goes_on(seconds, tmp_path):
    def run(at: int | None) -> subprocess.CompletedProcess:
        code = STOPPED.format(seconds=seconds, at=at)
        command = [sys.executable, "-c", code, str(tmp_path / "made")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    stopped = run(2)
    assert stopped.returncode == 128 + signal.SIGINT, stopped.stderr
    assert (
        "stopped. The same command goes on from the last save" in stopped.stderr and "Traceback" not in stopped.stderr
    ), stopped.stderr
    again = run(None)
    assert again.returncode == 0 and "12 sequences" in again.stdout, again.stderr
