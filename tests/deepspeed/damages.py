"""Everything that can be wrong with the folder of a save: what is done to it, and what has to be
said of it."""

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FACTOR, LAYER, HEADER = "head.A.factor.pt", "middle.layer.pt", "header.json"
NO_STATE = "no K-FAC state"
Damage = Callable[[Path], object]
Table = dict[str, tuple[Damage, str]]


def bytes_of(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def pipe(folder: Path) -> None:
    (folder / LAYER).unlink()
    os.mkfifo(folder / LAYER)


# files whose checksums fit: what a bug, or a file put together by hand, would leave


def header(change: Callable[[dict], object]) -> Damage:
    """The header as ``change`` leaves it."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / HEADER).read_text())["header"]
        change(content)
        crc32 = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
        (folder / HEADER).write_text(json.dumps({"crc32": crc32, "header": content}))

    return damage


def data(file: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).write_bytes(content)
        sizes = {"bytes": len(content), "crc32": zlib.crc32(content)}
        header(lambda h: h["files"][file].update(sizes))(folder)

    return damage


def payload(file: str, change: Callable[[dict], Any]) -> Damage:
    """The payload that ``change`` returns; None: as it leaves it."""

    def damage(folder: Path) -> None:
        content, written = torch.load(folder / file), io.BytesIO()
        changed = change(content)
        torch.save(content if changed is None else changed, written)
        data(file, written.getvalue())(folder)

    return damage


def packed(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Another average in a factor's file."""
    return payload(FACTOR, lambda p: p.update(packed=change(p["packed"])))


def first_is(value: float, tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = value
    return tensor


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return os.system, (f"touch {Evil.trace}",)

    trace = ""


def evil(folder: Path) -> None:
    Evil.trace = str(folder.parent.parent / "executed")
    data(FACTOR, pickle.dumps(Evil()))(folder)


FILES: Table = {
    "factor missing": (lambda f: (f / FACTOR).unlink(), f"{FACTOR}: is missing"),
    "header missing": (lambda f: (f / HEADER).unlink(), NO_STATE),
    "a pipe": (pipe, f"{LAYER}: is not a file"),
    "cut": (bytes_of(LAYER, lambda d: d[:-1]), f"{LAYER}: has"),
    "a bit": (bytes_of(FACTOR, lambda d: d[:-1] + bytes([d[-1] ^ 1])), f"{FACTOR}: wrong checksum"),
    "a pickle that runs a command": (evil, "more than plain tensors"),
    "header of bytes": (bytes_of(HEADER, lambda d: b"\xff\xfe\x00"), f"{HEADER}: is not JSON"),
    "a number": (bytes_of(HEADER, lambda d: d.replace(b": 4,", b": 5,")), f"{HEADER}: wrong check"),
}
PAYLOADS: Table = {
    "NaN": (packed(lambda P: first_is(float("nan"), P)), "is not finite"),
    "negative diagonal": (packed(lambda P: first_is(-1e6, P)), "negative diagonal"),
    "float64": (packed(torch.Tensor.double), "packed is float64 [210], but when"),
    "sparse": (packed(torch.Tensor.to_sparse), "is torch.sparse_coo float32"),
    "key missing": (payload(FACTOR, lambda p: p.pop("history")), "history is not there"),
    "no side": (payload(LAYER, lambda p: p.update(A=None)), "A is NoneType"),
}
HEADERS: dict[str, tuple[Callable[[dict], object], str]] = {
    "an older format": (lambda h: h.pop("format"), "another version of ds_kfac wrote this save"),
    "a newer format": (lambda h: h.update(format=3, more=1), "its format is 3, and this version"),
    "header with more": (lambda h: h.update(more=1), f"{HEADER}: more is unknown"),
    "another method": (lambda h: h.update(method="root"), "must be one of eigen, inverse"),
    "of another save": (lambda h: h.update(save_id="0123456789ab"), "belongs to save 0123456789ab"),
    "another file": (lambda h: h["files"][FACTOR].update(holds="middle/A"), "that it holds head/A"),
    "a larger factor": (lambda h: h["factors"].update({"head/A": [21, 21]}), "needs 210"),
    "a wider layer": (lambda h: h["layers"]["middle"].update(A=[34, 17]), "it is dense, 17 wide"),
    "a diagonal layer": (lambda h: h["layers"]["middle"].update(A=[17, 1]), "was diagonal, 17"),
}
DAMAGES: Table = {**FILES, **PAYLOADS}
DAMAGES |= {name: (header(change), words) for name, (change, words) in HEADERS.items()}
"""Loaded by its save id, as DeepSpeed's files name it."""


def latest(content: bytes) -> Damage:
    return lambda folder: (folder.parent / "latest").write_bytes(content)


def without_latest(folder: Path) -> None:
    """Harmless to a load by save id."""
    (folder.parent / "latest").unlink()


LATEST: Table = {
    "missing": (without_latest, NO_STATE),
    "points nowhere": (latest(b"0123456789ab"), NO_STATE),
    "a path": (lambda f: latest(f"../../tag/kfac/{f.name}".encode())(f), NO_STATE),
    "bytes": (latest(b"\xff\xfe"), NO_STATE),
}
"""Loaded without an id."""
