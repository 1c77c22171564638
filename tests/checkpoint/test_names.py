"""Names of a model never become paths, and no two of them become one file."""

from pathlib import Path

import pytest
import torch

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import (
    TOKEN,
    check_token,
    factor_file,
    layer_file,
    put_token,
    read_payload,
    write_payload,
    write_text,
)
from ds_kfac.zero.registry import check_names

NAMES = [
    "",
    "model",
    "~root",
    "h.0.attn",
    "H.0.attn",
    "h.0.ATTN",
    "adapters.en/de",
    "adapters.en_de",
    "/etc/passwd",
    "../up",
    "..",
    ".",
    ".hidden",
    "a" * 240,
    "a" * 241,
    "a" * 500,
    "über",
    "uber",
    "new\nline",
    "nul\0",
    "x.A",
    "x.a",
    "x",
    "con",
    "x.A.factor",
    "x.layer",
    "first.shard_0_of_2",
    "tab\t",
    " ",
    "a b",
    "\ud800",
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
    with pytest.raises(ValueError, match="two layers under one name, 'head'"):
        check_names(["first", "head", "head"])


def payload() -> dict:
    return {"weights": [torch.arange(1000.0), torch.ones(3, 3)], "none": None, "number": 3}


def test_a_file_is_read_as_it_was_written_or_not_at_all(tmp_path):
    path = tmp_path / "file.pt"
    entry = write_payload(path, "head", payload())
    data = path.read_bytes()
    assert entry.bytes == len(data)
    read = read_payload(path, "head", entry)
    assert torch.equal(read["weights"][0], payload()["weights"][0]) and read["number"] == 3
    for place in (0, 1, len(data) // 3, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"file\.pt: wrong checksum"):
            read_payload(path, "head", entry)
        path.write_bytes(data[:place])
        with pytest.raises(ValueError, match=r"file\.pt: has"):
            read_payload(path, "head", entry)


def test_a_text_is_put_there_whole(tmp_path, monkeypatch):
    write_text(tmp_path / "latest", "one")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ds_kfac.checkpoint.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "latest", "two")
    assert (tmp_path / "latest").read_text() == "one"


def test_everything_is_on_disk_before_it_is_referred_to(tmp_path, monkeypatch):
    """File before its name in the folder, and the rename after both."""
    calls = []
    sync, replace = files.os.fsync, files.os.replace
    monkeypatch.setattr(files.os, "fsync", lambda handle: (calls.append("sync"), sync(handle)))
    monkeypatch.setattr(
        files.os, "replace", lambda *paths: (calls.append("rename"), replace(*paths))
    )
    write_payload(tmp_path / "file.pt", "head", payload())
    assert calls == ["sync"]
    write_text(tmp_path / "header.json", "{}")
    assert calls == ["sync", "sync", "rename", "sync"]


def test_a_folder_that_is_not_shared_is_noticed(tmp_path):
    put_token(tmp_path / "one" / "tag" / "kfac" / "0123456789ab")
    check_token(tmp_path / "one" / "tag" / "kfac" / "0123456789ab")
    with pytest.raises(ValueError, match="save to a shared file system"):
        check_token(tmp_path / "two" / "tag" / "kfac" / "0123456789ab", patience=0)
    (tmp_path / "one" / "tag" / "kfac" / "0123456789ab" / TOKEN).write_text("of another save")
    with pytest.raises(ValueError, match="is not there"):
        check_token(tmp_path / "one" / "tag" / "kfac" / "0123456789ab", patience=0)


def test_what_could_not_be_loaded_is_not_written(tmp_path):
    good = {"packed": torch.ones(3), "updates": torch.ones(()), "history": None}
    write_payload(tmp_path / "file.pt", "head/A", good)
    for wrong, why in (
        ({"packed": torch.tensor([1.0, float("inf")])}, "head/A: packed is not finite"),
        (
            {"A": {"vectors": [torch.ones(2, 2), torch.full((2, 2), float("nan"))]}},
            r"vectors\.1 is not finite",
        ),
        ({"updates": -torch.ones(())}, "updates is negative"),
        ({"moments": {"second_OI": -torch.ones(2, 2)}}, "second_OI is negative"),
    ):
        with pytest.raises(ValueError, match=f"{why}; it is not saved"):
            write_payload(tmp_path / "other.pt", "head/A", good | wrong)
    assert not (tmp_path / "other.pt").exists()
