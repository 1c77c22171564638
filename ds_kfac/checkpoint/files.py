"""Write and read the files of a save.

    header.json            what the save holds, with the size, CRC-32 and parts of every other file,
                           and a CRC-32 of the header itself
    <layer>.A.factor.pt    a factor
    <layer>.layer.pt       a layer
    states.json            size and CRC-32 of every file that DeepSpeed wrote into the tag

``records.py`` has a pydantic model for each kind of file. A file is on disk before another file
refers to it. Before a file is used, its CRC is compared with the CRC that was computed when it was
written. This finds flipped bytes and swapped files, but not forged files. A layer's name cannot
lead to a path outside of the save's folder, see :func:`stem`.
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
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ds_kfac.checkpoint.records import (
    FORMAT,
    SAVE_ID,
    FactorKinds,
    FileEntry,
    Fingerprint,
    Fingerprints,
    Header,
    checked,
)
from ds_kfac.config.keys import KFACConfig

GRAMS = "grams"
"""Folder inside a tag that holds the factor A of every layer. A resumed run does not read it."""
FOLDER = "kfac"
"""Folder inside a tag that holds the saves."""
LATEST = "latest"
HEADER = "header.json"
TOKEN = "token"
STATES = "states.json"
PATIENCE = 5.0
"""Seconds that a network file system may take to show a new file to another node."""
PLAIN = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,119}")
"""Regex of layer names that are used as file names without a change."""
NOT_NEGATIVE = ("updates", "terms", "second_OI")
"""Names of tensors that are never negative, because they are counts or sums of squares."""

CLIENT_KEY = "ds_kfac"
"""Key of K-FAC's entry in DeepSpeed's client_state, which names the save. ds_to_universal keeps
this entry, but does not copy the save's folder."""
WEIGHTS_ALONE = (
    "To start from the weights alone, call load_checkpoint with load_module_only=True, "
    "load_optimizer_states=False (at stage 3 DeepSpeed needs both). With transformers' Trainer, "
    "pass the checkpoint's folder to from_pretrained, and do not pass a checkpoint to train()"
)
FRESH = '"checkpoint": {"on_missing": "fresh"} in the "kfac" block'


class CheckpointError(RuntimeError):
    """K-FAC's part of a checkpoint could not be written or loaded. It is raised on every rank, and
    its message says what to do."""


def kinds_of(config: KFACConfig) -> FactorKinds:
    """Return the kinds of rows that the factors A and G average in a run with this config."""
    options = config.factor
    sampler = f" of {options.sampler}" if options.fisher == "monte_carlo" else ""
    return FactorKinds(
        A=options.weight_sharing, G=f"{options.fisher}{sampler}, {options.weight_sharing}"
    )


# names


def stem(name: str) -> str:
    """Return the prefix that all file names of a layer share. It has at most 120 characters.

    Module names may contain "/" (keys of a ModuleDict) or hundreds of letters, and two names may
    differ only in case. A name of lower-case letters, digits, "_", "." and "-" is used unchanged.
    Any other name is replaced by its readable part, "~" and a hash. An unchanged name has no "~",
    so different names always give different files, even on file systems that ignore case.
    """
    if PLAIN.fullmatch(name):
        return name
    if not name:
        return "~root"
    readable = re.sub(r"[^a-z0-9_.-]", "_", name.lower())[:80].lstrip(".")
    return f"{readable}~{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


def layer_file(layer: str) -> str:
    """Return the name of a layer's file."""
    return f"{stem(layer)}.layer.pt"


def factor_file(key: str) -> str:
    """Return the name of a factor's file. ``key``: "<layer>/A" or "<layer>/G"."""
    layer = key[:-2]
    side = key[-1]
    return f"{stem(layer)}.{side}.factor.pt"


# payloads


class _SummingFile:
    """Writes to a file and computes the size and CRC-32 of what it writes, so that no second copy
    of a payload is needed in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.flush = file.flush
        self.crc32 = 0
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += memoryview(data).nbytes
        return self.file.write(data)


def write_payload(path: Path, holds: str, payload: Any) -> FileEntry:
    """Write a factor's or layer's tensors to a new file, and wait until they are on disk.

    Args:
        holds: name of the layer, or key of the factor, whose tensors these are.
        payload: tensors, in dicts and lists.

    Returns the file's entry in the header.

    Raises:
        ValueError: a tensor is not finite, or a sum of squares is negative. Nothing is written.
    """
    problem = _wrong_value(payload)
    if problem is not None:
        raise ValueError(f"{holds} is not saved, because its {problem}")
    with path.open("wb") as file:
        summing = _SummingFile(file)
        torch.save(payload, summing)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(
        holds=holds, bytes=summing.nbytes, crc32=summing.crc32, parts=_descriptions(payload)
    )


def read_payload(path: Path, holds: str, entry: FileEntry | None) -> Any:
    """Read what :func:`write_payload` wrote, to the CPU.

    Args:
        holds: name of the layer, or key of the factor, that the file should hold.
        entry: the file's entry in the header; None if the header has none.

    Raises:
        ValueError: there is no such file, or it is not the file that was written. The message
            begins with the file's path.
        OSError: the file cannot be read.
    """
    if entry is None or entry.holds != holds:
        raise ValueError(f"{path}: the header does not say that it holds {holds}")
    if not path.is_file():  # for example a folder, or a pipe, from which reading would block
        raise ValueError(f"{path}: {'is not a file' if path.exists() else 'is missing'}")
    data = path.read_bytes()
    if len(data) != entry.bytes:
        raise ValueError(
            f"{path}: has {len(data)} bytes, but {entry.bytes} were written: the file is cut off, "
            "or belongs to another save"
        )
    if zlib.crc32(data) != entry.crc32:
        raise ValueError(
            f"{path}: wrong checksum: the file is damaged, or belongs to another layer or save"
        )
    try:
        payload = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # A pickle that ds_kfac did not write may raise any error. It is not executed. Every rank
        # reports the error.
        raise ValueError(
            f"{path}: holds more than plain tensors: {str(error).splitlines()[0]}"
        ) from error
    now = _descriptions(payload)
    for name in sorted(now.keys() | entry.parts.keys()):
        has = now.get(name, "not there")
        had = entry.parts.get(name, "not there")
        if has != had:
            raise ValueError(f"{path}: {name} is {has}, but when it was written it was {had}")
    problem = _wrong_value(payload)
    if problem is not None:
        raise ValueError(f"{path}: {problem}")
    return payload


def _parts(payload: Any, path: str = "") -> dict[str, Any]:
    """Return a dict from path, such as "A.eigenvectors", to object, for every object in a payload.
    The path of the payload itself is ""."""
    parts = {path: payload}
    if isinstance(payload, dict):
        items = list(payload.items())
    elif isinstance(payload, (list, tuple)):
        items = list(enumerate(payload))
    else:
        items = []
    for key, value in items:
        parts |= _parts(value, f"{path}.{key}" if path else str(key))
    return parts


def _descriptions(payload: Any) -> dict[str, str]:
    """Return a dict from the path of every object in a payload to a description of the object. A
    tensor's description is its dtype and shape. Any other object's description is the name of its
    type."""
    return {path: _described(part) for path, part in _parts(payload).items()}


def _described(part: Any) -> str:
    if not isinstance(part, Tensor):
        return type(part).__name__
    layout = "" if part.layout is torch.strided else f"{part.layout} "
    return f"{layout}{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"


def _wrong_value(payload: Any) -> str | None:
    """Return a text that names a tensor with impossible values and says what is wrong with them.
    Return None if all values are possible. Without this check an impossible value would cause an
    error in a later step, and on one rank only."""
    for path, part in _parts(payload).items():
        if not isinstance(part, Tensor):
            continue
        if not bool(torch.isfinite(part).all()):
            return f"{path} is not finite"
        name = path.rpartition(".")[-1]
        if name in NOT_NEGATIVE and bool((part < 0).any()):
            return f"{path} is negative"
    return None


# texts and folders


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically. After a crash, either the old or the new file exists, and it is
    complete."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's list of files is on disk, if the file system supports this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def put_token(folder: Path) -> None:
    """Make a save's folder, and put a token there for the other ranks to find."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TOKEN, folder.name)
    for parent in (folder.parent, folder.parent.parent):
        sync_folder(parent)


def check_token(folder: Path, patience: float = PATIENCE) -> None:
    """Wait until this rank sees the token of :func:`put_token`.

    Args:
        patience: seconds to wait.

    Raises:
        ValueError: the token is not there, so this rank and rank 0 write to different disks.
    """
    deadline = time.monotonic() + patience
    token = folder / TOKEN
    while not token.is_file() or token.read_text() != folder.name:
        if time.monotonic() > deadline:
            raise ValueError(
                f"{folder.absolute()}, which rank 0 has made, does not exist on this rank. All "
                "ranks save their parts of K-FAC's state to this folder: save to a shared file "
                "system that every rank mounts under the same path"
            )
        time.sleep(0.05)


# the header


def write_header(folder: Path, header: Header) -> None:
    """Write header.json, which completes K-FAC's part of a save, and remove the token."""
    sync_folder(folder)
    content = header.model_dump()
    wrapped = {"crc32": _crc32(content), "header": content}
    write_text(folder / HEADER, json.dumps(wrapped, indent=1))
    (folder / TOKEN).unlink()


def read_header(folder: Path) -> Header:
    """Read the header of the save in a folder.

    Raises:
        ValueError: the file is damaged, belongs to another save, or was written by another version
            of ds_kfac. The message begins with the file's path.
    """
    path = folder / HEADER
    try:
        wrapped = json.loads(path.read_bytes())
    except ValueError as error:  # undecodable bytes raise it, too
        raise ValueError(f"{path}: is not JSON: {error}") from error
    content = wrapped.get("header") if isinstance(wrapped, dict) else None
    if not isinstance(content, dict) or wrapped.get("crc32") != _crc32(content):
        raise ValueError(f"{path}: wrong checksum: the file is damaged")
    saved_format = content.get("format")
    if saved_format != FORMAT:
        raise ValueError(
            f"{path}: another version of ds_kfac wrote this save: its format is "
            f"{saved_format or 1}, and this version reads only format {FORMAT}. Load it with the "
            "version that wrote it, or let K-FAC start afresh"
        )
    header = checked(Header, content, path)
    if header.save_id != folder.name:
        raise ValueError(f"{path}: belongs to save {header.save_id}, not to {folder.name}")
    return header


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


# a tag


def find(tag_directory: Path, save_id: str | None, origin: str | None) -> Path:
    """Return the folder of a save.

    The folder is in the tag. If the tag was made by ds_to_universal, the folder is still in the tag
    that was converted, because this tool does not copy it.

    Args:
        save_id: id of the save; None: the tag's last finished save.
        origin: folder to which DeepSpeed's checkpoint was saved; None: unknown. If the checkpoint
            was converted, K-FAC's save may still be in that folder.

    Raises:
        ValueError: no tag has the save.
    """
    tags = [tag_directory, tag_directory.with_name(tag_directory.name.removesuffix("_universal"))]
    if origin is not None:
        tags.append(Path(origin))
    for tag in tags:
        name = save_id or _latest(tag)
        if re.fullmatch(SAVE_ID, name) and (tag / FOLDER / name / HEADER).is_file():
            return tag / FOLDER / name
    looked = ", ".join(str(tag / FOLDER) for tag in dict.fromkeys(tags))
    raise ValueError(
        f"no K-FAC state {save_id or ''} in {looked}. Every rank must see one of these folders. If "
        f"the tag was converted or moved, copy the folder {FOLDER} from the original tag to "
        f"{tag_directory}"
    )


def _latest(tag: Path) -> str:
    """Return the id of a tag's last finished save; "" if no file names it."""
    path = tag / FOLDER / LATEST
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def fingerprints(tag_directory: Path) -> dict[str, Fingerprint]:
    """Return a dict from file name to fingerprint for DeepSpeed's files in a tag. The tensors in
    the files are not read. A copy of a file has the same fingerprint, because file times are
    ignored."""
    prints = {}
    for path in sorted(tag_directory.glob("*_states.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                records = [
                    [record.filename, record.file_size, record.CRC] for record in archive.infolist()
                ]
        except zipfile.BadZipFile:  # another checkpoint engine wrote the file
            records = []
        crc32 = zlib.crc32(json.dumps(records).encode())
        prints[path.name] = Fingerprint(path.stat().st_size, crc32)
    return prints


def write_states(folder: Path, names: bool = True) -> None:
    """Write states.json, the last file of a save. If it exists, the save has reached its end.

    Args:
        folder: the folder of the save.
        names: whether to list DeepSpeed's files; False while DeepSpeed is still writing them.
    """
    prints = fingerprints(folder.parent.parent) if names else {}
    write_text(folder / STATES, json.dumps(prints, indent=1))


def _read_states(folder: Path) -> dict[str, Fingerprint] | None:
    """Return what :func:`write_states` wrote; None if the save did not reach its end."""
    try:
        return Fingerprints.validate_json((folder / STATES).read_bytes())
    except (OSError, ValueError):
        return None


class Interruption(NamedTuple):
    """A save to a tag that did not reach its end.

    Attributes:
        sentence: text for an error message that says which save was interrupted.
        foreign: names of DeepSpeed's files in the tag that belong to another save than the one that
            is loaded.
    """

    sentence: str
    foreign: list[str]


def unfinished(tag_directory: Path, save_id: str) -> Interruption | None:
    """Look for signs that the save with id ``save_id``, or a later save to the same tag, was
    interrupted. Call this on one rank.

    Returns None if there are no such signs.
    """
    folder = tag_directory / FOLDER
    saves = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    others = [path for path in saves if path.name != save_id]
    written = _read_states(folder / save_id)
    if written is not None and not others:
        return None
    now = fingerprints(tag_directory)
    if written is not None:
        named = ", ".join(path.name for path in others)
        sentence = f"save {named}, a later save to {tag_directory}, was interrupted"
        replaced = [name for name, print_ in now.items() if written.get(name, print_) != print_]
        # without fingerprints it is not known which files the other save has replaced
        return Interruption(sentence, replaced) if replaced or not written else None
    if not (folder / save_id).is_dir():
        return None  # converted or moved: K-FAC's state is elsewhere
    older = [
        name
        for other in others
        for name, print_ in (_read_states(other) or {}).items()
        # DeepSpeed writes the files of layers before a rank's other files. The files of layers may
        # be the same in two saves
        if now.get(name) == print_ and not name.startswith("layer_")
    ]
    sentence = f"save {save_id} to {tag_directory} was interrupted before its end"
    return Interruption(sentence, sorted(older))
