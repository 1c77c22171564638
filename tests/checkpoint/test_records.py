"""What a header may hold, and what is said of one that holds something else."""

import json
import zlib

import pytest

from ds_kfac.checkpoint.files import put_token, read_header, write_header
from ds_kfac.checkpoint.records import FORMAT, Header

SAVE_ID = "0123456789ab"
NAME = "adapters.\ud800/de"
"""A module's name may hold anything, lone surrogates too."""


def content() -> dict:
    return {
        "format": FORMAT,
        "save_id": SAVE_ID,
        "steps": 4,
        "method": "eigen",
        "moments": None,
        "kinds": {"A": "expand", "G": "empirical, expand"},
        "layers": {NAME: {"A": [5, 5], "G": [3, 0], "groups": 1}},
        "factors": {f"{NAME}/A": [5, 5]},
        "peak_lr": {"0": 0.1},
        "shared": [[NAME, "head"]],
        "rows": {NAME: 2},
        "ranks": {"": 2},
        "timetable": {"domains": {"": [3, 1]}, "factors": {f"{NAME}/A": [2, 1, 3, -1]}},
        "ready": [f"{NAME}/A"],
        "files": {"x": {"holds": NAME, "bytes": 9, "crc32": 7, "parts": {"": "dict"}}},
    }


def test_a_header_is_read_as_it_was_written(tmp_path):
    folder = tmp_path / "tag" / "kfac" / SAVE_ID
    put_token(folder)
    header = Header.model_validate(content())
    write_header(folder, header)
    assert read_header(folder) == header
    assert json.loads((folder / "header.json").read_text())["header"] == content()
    assert header.layers[NAME].A.side.dim == 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": "4"}, "steps is '4': Input should be a valid integer"),
        ({"steps": True}, "steps is True"),
        ({"method": "root"}, "method is 'root': .*must be one of eigen, inverse"),
        ({"save_id": "../etc"}, "save_id is '../etc'"),
        ({"layers": {"head": {"A": [5], "G": [3, 3], "groups": 1}}}, r"head\.A\.1 is missing"),
        ({"factors": {"head/A": [5, -1]}}, r"factors\.head/A\.1 is -1"),
        ({"more": 1}, "more is unknown"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_found(tmp_path, change, text):
    folder = tmp_path / SAVE_ID
    folder.mkdir()
    header = {**content(), **change}
    crc32 = zlib.crc32(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    (folder / "header.json").write_text(json.dumps({"crc32": crc32, "header": header}))
    with pytest.raises(ValueError, match=rf"header\.json: .*{text}.*load another save"):
        read_header(folder)
