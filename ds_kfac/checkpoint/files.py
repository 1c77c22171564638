"""The files of a save: on disk when something refers to them, and read only if they are what was
written.

    header.json            what the save holds: the size, CRC-32 and parts of every file; and its
                           own CRC-32
    <layer>.A.factor.pt    a factor
    <layer>.layer.pt       a layer
    states.json            of every file that DeepSpeed wrote into the tag its size and CRC-32

A CRC finds every flipped byte and every other file; it is no signature. A name of the model never
becomes a path.
"""

import errno
import hashlib
import io
import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import METHODS

GRAMS = "grams"
"""Folder of a checkpoint for A of every layer, of which a resumed run reads nothing."""
FOLDER, LATEST, HEADER, TOKEN, STATES = "kfac", "latest", "header.json", "token", "states.json"
PATIENCE = 5.0
"""Seconds that a network file system may take to show a new file to another node."""
PLAIN = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,119}")
SAVE_ID = re.compile(r"[0-9a-f]{12}")
"""Of a save, and the name of its folder."""

FORMAT = 2
"""Number of the layout of all files of a save. Raise it whenever an older version could not read
them."""
FIELDS: Mapping[str, Any] = {
    "format": int,
    "save_id": SAVE_ID,
    "steps": int,
    "method": re.compile("|".join(METHODS)),
    "moments": (None, str),
    "kinds": {"A": str, "G": str},
    "layers": {...: {"A": [int, int], "G": [int, int], "groups": int}},
    "factors": {...: [int, int]},
    "peak_lr": {...: float},
    "shared": (None, [[str]]),
    "rows": {...: float},
    "ranks": {...: int},
    "timetable": {"domains": {...: [int, int]}, "factors": {...: [float, float, float, float]}},
    "ready": [str],
    "files": {...: {"holds": str, "bytes": int, "crc32": int, "parts": {...: str}}},
}
"""What a header has, and the type of each value: an int is not negative, a float may be an int,
``...`` is any name, a list with one type has any length.

    format: see :data:`FORMAT`.
    save_id: also the name of the folder and in DeepSpeed's client_state.
    steps: applied ones.
    method, moments: what the layers' files hold.
    kinds: what the factors are the second moments of; factors of another kind start empty.
    layers, factors: name -> (width, block) of both sides, or of the factor's.
    peak_lr: parameter group -> largest learning rate so far.
    shared: groups of layers with one A; null if they were not known yet.
    rows: layer -> rows of a rank in a step; none if they were not known yet, or nothing depends on
        them.
    ranks: domain -> its ranks, of which each had these rows.
    timetable, ready: see ``Timetable`` and ``FactorUpdates``.
    files: file -> the layer or factor it holds, size, checksum, and its parts.
"""

CLIENT_KEY = "ds_kfac"
"""Key in DeepSpeed's client_state that names the save; survives ds_to_universal, which does not
copy the folder."""
WEIGHTS_ALONE = (
    "Pass load_module_only=True, load_optimizer_states=False (at stage 3 DeepSpeed needs both) to "
    "start from the "
    "weights alone; with transformers' Trainer give from_pretrained the checkpoint's folder, and "
    "train() none"
)
FRESH = '"checkpoint": {"on_missing": "fresh"} in the "kfac" block'


class CheckpointError(RuntimeError):
    """K-FAC's part of a checkpoint could not be written or cannot be loaded; raised on every rank,
    with what to do."""


def kinds_of(config: KFACConfig) -> dict[str, str]:
    """What A and G are second moments of. Averages of different kinds must not be mixed."""
    options = config.factor
    sampled = f" of {options.sampler}" if options.fisher == "monte_carlo" else ""
    return {
        "A": options.weight_sharing,
        "G": f"{options.fisher}{sampled}, {options.weight_sharing}",
    }


# names


def stem(name: str) -> str:
    """What the files of a layer begin with; at most 120 characters.

    Module names may hold anything: "/" (keys of a ModuleDict), capitals that differ in nothing
    else, hundreds of letters. A name of small letters, digits, "_", "." and "-" stays as it is; any
    other becomes what is readable of it and a hash, joined by "~", which the first kind does not
    have. So two names are two files, on file systems that ignore case too.
    """
    if PLAIN.fullmatch(name):
        return name
    if not name:
        return "~root"
    readable = re.sub(r"[^a-z0-9_.-]", "_", name.lower())[:80].lstrip(".")
    return f"{readable}~{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


def layer_file(layer: str) -> str:
    return f"{stem(layer)}.layer.pt"


def factor_file(key: str) -> str:
    """``key``: "<layer>/A" or "<layer>/G"."""
    return f"{stem(key[:-2])}.{key[-1]}.factor.pt"


# payloads


class _Summed:
    """A file that adds up what is written to it: a payload is not in memory a second time."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.flush, self.crc32, self.nbytes = file, file.flush, 0, 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += memoryview(data).nbytes
        return self.file.write(data)


def write_payload(path: Path, holds: str, payload: Any) -> dict[str, Any]:
    """Write plain tensors of a factor or layer to a new file and wait until they are on disk.
    Returns the header's entry. Raises ValueError, and writes nothing, if a tensor is not finite, or
    a sum of squares negative."""
    if wrong := _wrong_value(payload):
        raise ValueError(f"{holds}: {wrong}; it is not saved")
    parts = {name: _described(part) for name, part in _parts(payload).items()}
    with path.open("wb") as file:
        summed = _Summed(file)
        torch.save(payload, summed)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return {"holds": holds, "bytes": summed.nbytes, "crc32": summed.crc32, "parts": parts}


def read_payload(path: Path, holds: str, entry: Mapping[str, Any] | None) -> Any:
    """What :func:`write_payload` wrote, on the CPU. ``entry``: the header's.

    Raises:
        ValueError: there is no such file, or it is another one; the message begins with its path.
        OSError: it cannot be read.
    """
    if entry is None or entry["holds"] != holds:
        raise ValueError(f"{path}: the header does not say that it holds {holds}")
    if not path.is_file():  # nor a folder, nor a pipe, which would block the read
        raise ValueError(f"{path}: {'is no file' if path.exists() else 'is missing'}")
    data = path.read_bytes()
    if len(data) != entry["bytes"]:
        raise ValueError(
            f"{path}: has {len(data)} bytes, {entry['bytes']} were written; cut off, or of "
            f"another save"
        )
    if zlib.crc32(data) != entry["crc32"]:
        raise ValueError(
            f"{path}: wrong checksum: the file is damaged, or belongs to another layer or save"
        )
    try:
        payload = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # what a foreign pickle makes of the unpickler: reported by every rank, never executed
        raise ValueError(
            f"{path}: holds more than plain tensors: {str(error).splitlines()[0]}"
        ) from error
    found, written = (
        {name: _described(part) for name, part in _parts(payload).items()},
        entry["parts"],
    )
    for name in sorted(found.keys() | written.keys()):
        if found.get(name) != written.get(name):
            has, had = (parts.get(name, "not there") for parts in (found, written))
            raise ValueError(f"{path}: {name} is {has}, when it was written it was {had}")
    if wrong := _wrong_value(payload):
        raise ValueError(f"{path}: {wrong}")
    return payload


def _parts(payload: Any, path: str = "") -> dict[str, Any]:
    """Path in the payload -> what is there, of tables, lists and what they hold; "" is the
    whole."""
    found = {path: payload}
    if isinstance(payload, (dict, list, tuple)):
        for key, value in payload.items() if isinstance(payload, dict) else enumerate(payload):
            found |= _parts(value, f"{path}.{key}" if path else str(key))
    return found


def _described(part: Any) -> str:
    if not isinstance(part, Tensor):
        return type(part).__name__
    layout = "" if part.layout is torch.strided else f"{part.layout} "
    return f"{layout}{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"


def _wrong_value(payload: Any) -> str | None:
    """What would else be found out in a later step, on one rank."""
    for name, value in _parts(payload).items():
        if not isinstance(value, Tensor):
            continue
        if not bool(torch.isfinite(value).all()):
            return f"{name} is not finite"
        if name.rpartition(".")[-1] in ("updates", "terms", "second_OI") and bool(
            (value < 0).any()
        ):
            return f"{name} is negative"
    return None


# texts and folders


def write_text(path: Path, text: str) -> None:
    """Put a file there at once, whole and on disk, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in it are on disk, where the file system knows how."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def put_token(folder: Path) -> None:
    """Make the folder, whose name no other save has, and put something there for the other ranks to
    find."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TOKEN, folder.name)
    for parent in (folder.parent, folder.parent.parent):
        sync_folder(parent)


def check_token(folder: Path, patience: float = PATIENCE) -> None:
    """Raise ValueError where the folder that rank 0 made is not to be seen."""
    deadline = time.monotonic() + patience
    while not (folder / TOKEN).is_file() or (folder / TOKEN).read_text() != folder.name:
        if time.monotonic() > deadline:
            raise ValueError(
                f"{folder.absolute()}, which rank 0 has made, is not there. K-FAC's state is "
                f"spread over all ranks and "
                "is saved to one folder that all of them see: save to a shared file system, under "
                "the same path"
            )
        time.sleep(0.05)


# the header


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Last of a save's files: with it the save is complete."""
    sync_folder(folder)
    write_text(folder / HEADER, json.dumps({"crc32": _crc32(header), "header": header}, indent=1))
    (folder / TOKEN).unlink()


def read_header(folder: Path) -> dict[str, Any]:
    """Of the save in a folder. Raises ValueError that begins with the file's path: damaged, of
    another save or another version of ds_kfac."""
    path = folder / HEADER
    try:
        wrapped = json.loads(path.read_bytes())
    except ValueError as error:  # also undecodable bytes
        raise ValueError(f"{path}: is no JSON: {error}") from error
    header = wrapped.get("header") if isinstance(wrapped, dict) else None
    if not isinstance(header, dict) or wrapped.get("crc32") != _crc32(header):
        raise ValueError(f"{path}: wrong checksum: the file is damaged")
    if (written := header.get("format")) != FORMAT:
        raise ValueError(
            f"{path}: another version of ds_kfac wrote this save: its format is {written or 1}, "
            f"and this version reads "
            f"format {FORMAT} alone. Go on with the version that wrote it, or let K-FAC start "
            f"afresh"
        )
    wrong = [
        name
        for name in FIELDS.keys() | header
        if name not in FIELDS or not _fits(header.get(name), FIELDS[name])
    ]
    if wrong:
        raise ValueError(
            f"{path}: {', '.join(sorted(wrong))}: missing, unknown or not what ds_kfac writes"
        )
    if header["save_id"] != folder.name:
        raise ValueError(f"{path}: is of save {header['save_id']}, not of {folder.name}")
    return header


def _crc32(header: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value may stand where ``FIELDS`` has ``kind``."""
    if isinstance(kind, tuple):
        return value is None or _fits(value, kind[1])
    if isinstance(kind, list):
        kinds = kind * len(value) if len(kind) == 1 and isinstance(value, list) else kind
        return (
            isinstance(value, list) and len(value) == len(kinds) and all(map(_fits, value, kinds))
        )
    if isinstance(kind, dict):
        names = isinstance(value, dict) and (... in kind or value.keys() == kind.keys())
        return names and all(
            _fits(part, kind.get(..., kind.get(name))) for name, part in value.items()
        )
    if isinstance(kind, re.Pattern):
        return isinstance(value, str) and bool(kind.fullmatch(value))
    if isinstance(value, bool) or kind in (str, bool):
        return type(value) is kind
    return isinstance(value, int) and value >= 0 if kind is int else isinstance(value, (int, float))


# a tag


def find(tag_directory: Path, save_id: str | None, origin: str | None) -> Path:
    """The folder of a save in the tag, or in the tag it was converted from by ds_to_universal,
    which does not copy it. Raises ValueError if none has it."""
    tags = [tag_directory, tag_directory.with_name(tag_directory.name.removesuffix("_universal"))]
    if origin is not None:
        tags.append(Path(origin))
    for tag in tags:
        latest = tag / FOLDER / LATEST
        name = save_id or (latest.read_text(errors="replace").strip() if latest.is_file() else "")
        if SAVE_ID.fullmatch(name) and (tag / FOLDER / name / HEADER).is_file():
            return tag / FOLDER / name
    looked = ", ".join(str(tag / FOLDER) for tag in dict.fromkeys(tags))
    raise ValueError(
        f"no K-FAC state {save_id or ''} in {looked}; it must be there for every rank. If it was "
        f"converted or moved, "
        f"copy the folder {FOLDER} of the tag that was saved into {tag_directory}"
    )


def fingerprints(tag_directory: Path) -> dict[str, list[int]]:
    """Of DeepSpeed's files in a tag: the file's name -> its bytes, and one CRC-32 over those that
    torch's archive has of its records. Values are not read, and times do not count: a copy has the
    same."""
    found = {}
    for path in sorted(tag_directory.glob("*_states.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                records = [
                    [record.filename, record.file_size, record.CRC] for record in archive.infolist()
                ]
        except zipfile.BadZipFile:  # of another checkpoint engine
            records = []
        found[path.name] = [path.stat().st_size, zlib.crc32(json.dumps(records).encode())]
    return found


def write_states(folder: Path, names: bool = True) -> None:
    """The last file of a save: DeepSpeed's, too, has reached its end. Without ``names`` its files
    are still written."""
    write_text(
        folder / STATES, json.dumps(fingerprints(folder.parent.parent) if names else {}, indent=1)
    )


def _read_states(folder: Path) -> dict[str, list[int]] | None:
    """None: the save did not reach its end."""
    try:
        return dict(json.loads((folder / STATES).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def unfinished(tag_directory: Path, save_id: str) -> tuple[str, list[str]] | None:
    """What speaks for an interrupted save over this one's tag, or of it: a sentence, and the names
    of DeepSpeed's files that are not this save's. None: nothing does. For one rank."""
    folder = tag_directory / FOLDER
    others = (
        [path for path in folder.iterdir() if path.is_dir() and path.name != save_id]
        if folder.is_dir()
        else []
    )
    own = _read_states(folder / save_id)
    if own is not None and not others:
        return None
    here = fingerprints(tag_directory)
    if own is not None:
        named = ", ".join(path.name for path in others)
        sentence = f"save {named}, later than that of {tag_directory}, was interrupted"
        differ = [name for name, found in here.items() if own.get(name, found) != found]
        return (sentence, differ) if differ or not own else None
    if not (folder / save_id).is_dir():
        return None  # converted or moved: K-FAC's state is elsewhere
    # a file of layers alone may be the same in both: DeepSpeed writes it before the rank's other
    # files
    older = [
        name
        for other in others
        for name, found in (_read_states(other) or {}).items()
        if here.get(name) == found and not name.startswith("layer_")
    ]
    return f"save {save_id} of {tag_directory} was interrupted before its end", sorted(older)
