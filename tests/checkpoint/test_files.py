"""Files of a save: names of a model never become paths, what is written is whole and on disk, and
what a tag's folder shows of saves that were interrupted."""

from pathlib import Path

import pytest
import torch

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import (
    factor_file,
    layer_file,
    unfinished,
    write_payload,
    write_states,
    write_text,
)
from ds_kfac.zero.registry import check_names

NAMES = [
    *("", "model", "~root", "h.0.attn", "H.0.attn", "h.0.ATTN", "adapters.en/de", "adapters.en_de"),
    *("/etc/passwd", "../up", "..", ".", ".hidden", "a" * 240, "a" * 241, "a" * 500),
    *("über", "uber", "new\nline", "nul\0", "tab\t", " ", "a b", "\ud800", "con"),
    *("x.A", "x.a", "x", "x.A.factor", "x.layer", "first.shard_0_of_2"),
]


def test_every_name_is_one_file_in_the_folder(tmp_path):
    files = [
        file
        for name in NAMES
        for file in (layer_file(name), factor_file(f"{name}/A"), factor_file(f"{name}/G"))
    ]
    for file in files:
        assert len(file.encode()) < 200 and file.isprintable()
        assert (tmp_path / file).parent == tmp_path and Path(file).name == file
        (tmp_path / file).write_text("x")
    # also where case does not count
    assert len({file.lower() for file in files}) == len(files) == len(list(tmp_path.iterdir()))
    assert layer_file("h.0.attn") == "h.0.attn.layer.pt", "usual names stay readable"


def test_a_name_that_is_there_twice_is_refused():
    check_names(NAMES)
    with pytest.raises(ValueError, match="two layers would have the same name"):
        check_names(["first", "head", "head"])


def test_everything_is_on_disk_before_it_is_referred_to(tmp_path, monkeypatch):
    """File before its name in the folder, and the rename after both."""
    calls = []
    sync, replace = files.os.fsync, files.os.replace
    monkeypatch.setattr(files.os, "fsync", lambda handle: (calls.append("sync"), sync(handle)))
    monkeypatch.setattr(
        files.os, "replace", lambda *paths: (calls.append("rename"), replace(*paths))
    )
    write_payload(tmp_path / "file.pt", "head", {"number": 3})
    assert calls == ["sync"]
    write_text(tmp_path / "header.json", "{}")
    assert calls == ["sync", "sync", "rename", "sync"]


def test_what_could_not_be_loaded_is_not_written(tmp_path):
    wrong = {"A": {"vectors": [torch.ones(2), torch.full((2,), torch.nan)]}}
    negative = {"moments": {"second_OI": -torch.ones(2, 2)}}
    for payload, why in ((wrong, r"A\.vectors\.1 is not"), (negative, "second_OI is negative")):
        with pytest.raises(ValueError, match=f"not saved, because its .*{why}"):
            write_payload(tmp_path / "wrong.pt", "head/A", payload)
    assert not (tmp_path / "wrong.pt").exists()


# saves that were interrupted

OLD, NEW = "aaaabbbbcccc", "ddddeeeeffff"
MODEL, OPTIMIZER, OWN = "mp_rank_00_model_states.pt", "optim_states.pt", "own_states.pt"
LAYER = "layer_00-model_states.pt"


def test_files_that_a_later_save_replaced_or_did_not_are_named(tmp_path):
    """One save has reached its end, and another has begun after it."""
    kfac = tmp_path / "kfac"

    def write(name: str, value: float) -> None:
        torch.save({"value": torch.full((5,), value), "text": "x" * 40}, tmp_path / name)

    for save in (OLD, NEW):
        (kfac / save).mkdir(parents=True)
    for name in (MODEL, LAYER, OPTIMIZER):
        write(name, 1.0)
    (tmp_path / OWN).write_bytes(b"of another checkpoint engine")
    write_states(kfac / OLD)
    assert unfinished(tmp_path, OLD) is None, "the later one has written nothing of DeepSpeed's"
    write(MODEL, 2.0)
    sentence, replaced = unfinished(tmp_path, OLD)
    assert NEW in sentence and replaced == [MODEL]
    sentence, older = unfinished(tmp_path, NEW)
    assert "before its end" in sentence
    assert older == [OPTIMIZER, OWN], "the layer's file may be of a layer that is not trained"
    write(OPTIMIZER, 2.0)
    (tmp_path / OWN).write_bytes(b"of another checkpoint engine, and longer")
    assert unfinished(tmp_path, OLD)[1] == [MODEL, OPTIMIZER, OWN]
    (kfac / OLD / "states.json").write_text("{")
    sentence = f"save {OLD} to {tmp_path} was interrupted before its end"
    assert unfinished(tmp_path, OLD) == (sentence, [])
