"""``header.json``: what a save holds, with the checksums of its files and its own.

Names in it are compared with the model's; none of them becomes a path.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_kfac.checkpoint.disk import write_text
from ds_kfac.checkpoint.names import SAVE_ID
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.directions.table import moments_named

HEADER = "header.json"
VERSION = 6


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _name(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list(of: Callable[[Any], bool], length: int | None = None) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value)) and (length is None or len(value) == length)


def _table(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _fields(**of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and value.keys() == of.keys() and all(check(value[key]) for key, check in of.items())
    )


def _or_none(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or of(value)


_side = _list(_count, 2)
FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "save_id": lambda value: isinstance(value, str) and bool(SAVE_ID.fullmatch(value)),
    "steps": _count,
    "method": lambda value: _name(value) and value in FACTOR_FORMS,
    "eigenbases": lambda value: isinstance(value, bool),
    "moments": lambda value: value is None or (_name(value) and value in moments_named()),
    "kinds": _fields(A=_name, G=_name),
    "layers": _table(_fields(A=_side, G=_side)),
    "factors": _table(_side),
    "peak_lr": lambda value: _table(_number)(value) and all(group.isdecimal() for group in value),
    "damping_scale": _or_none(_number),
    "shared": _or_none(_list(_list(_name))),
    "rows": _table(_number),
    "timetable": _fields(domains=_table(_list(_count, 2)), factors=_table(_list(lambda v: isinstance(v, int), 4))),
    "ready": _list(_name),
    "pending": _table(_count),
    "files": _table(_fields(holds=_name, bytes=_count, crc32=_count, tensors=_table(_name))),
}
"""What a header has, and whether a value may stand there.

    save_id: also the name of the folder and in DeepSpeed's client_state.
    steps: applied ones.
    method, eigenbases, moments: what the layers' files hold.
    kinds: what the factors are the second moments of; factors of another kind start empty.
    layers, factors: name -> (width, block) of both sides, or of the factor's.
    peak_lr: parameter group -> largest learning rate so far.
    damping_scale: what damping was relative to; null if the layers alone determine it.
    shared: groups of layers with one A; null if they were not known yet.
    rows: layer -> rows of a rank in a step; none if they were not known yet, or nothing depends on them.
    timetable, ready, pending: see ``Timetable`` and ``FactorUpdates``.
    files: file -> the layer or factor it holds, size, checksum, and its tensors for people.
"""


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Last of a save's files: with it the save is complete."""
    content = dict(header)
    wrapped = {"version": VERSION, "crc32": _crc32(content), "header": content}
    write_text(folder / HEADER, json.dumps(wrapped, indent=1))


def read_header(folder: Path) -> dict[str, Any]:
    """The header of the save in ``folder``.

    Raises:
        ValueError: damaged, of another version or save; the message begins with the file's path.
    """
    path = folder / HEADER
    try:
        wrapped = json.loads(path.read_bytes())
    except ValueError as error:  # also undecodable bytes
        raise ValueError(f"{path}: is no JSON: {error}") from error
    version = wrapped.get("version") if isinstance(wrapped, dict) else None
    if version != VERSION:
        raise ValueError(f"{path}: has version {version}, this ds_kfac reads {VERSION} only")
    header = wrapped.get("header")
    if not isinstance(header, dict) or wrapped.get("crc32") != _crc32(header):
        raise ValueError(f"{path}: wrong checksum: the file is damaged")
    wrong = [name for name, check in FIELDS.items() if name not in header or not check(header[name])]
    unknown = sorted(header.keys() - FIELDS.keys())
    if wrong or unknown:
        raise ValueError(f"{path}: {', '.join(wrong + unknown)}: missing, unknown or not what ds_kfac writes")
    if header["save_id"] != folder.name:
        raise ValueError(f"{path}: is of save {header['save_id']}, not of {folder.name}")
    return header


def _crc32(header: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
