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

FACTOR, LAYER, OTHER, HEADER = (
    "head.A.factor.pt",
    "middle.layer.pt",
    "first.layer.pt",
    "header.json",
)
NAN, NO_STATE = float("nan"), "no K-FAC state"
Damage = Callable[[Path], object]
Table = dict[str, tuple[Damage, str]]


def bytes_of(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def becomes(file: str, make: Callable[[Path], object]) -> Damage:
    """Another thing of that name."""

    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


def swapped(folder: Path) -> None:
    first, second = ((folder / file).read_bytes() for file in (LAYER, OTHER))
    (folder / LAYER).write_bytes(second)
    (folder / OTHER).write_bytes(first)


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


OUT = "../../../whole/kfac/x"
"""Name of a layer that would lead out of the folder, were it a path."""


def leads_out(content: dict) -> None:
    content["shared"] = [[OUT, "first"]]
    content["factors"][f"{OUT}/A"] = content["factors"]["first/A"]


FILES: Table = {
    "factor missing": (lambda f: (f / FACTOR).unlink(), f"{FACTOR}: is missing"),
    "header missing": (lambda f: (f / HEADER).unlink(), NO_STATE),
    "a link to itself": (becomes(LAYER, lambda p: p.symlink_to(p)), LAYER),
    "a pipe": (becomes(LAYER, os.mkfifo), f"{LAYER}: is not a file"),
    "empty": (bytes_of(FACTOR, lambda d: b""), f"{FACTOR}: has 0 bytes"),
    "cut": (bytes_of(LAYER, lambda d: d[:-1]), f"{LAYER}: has"),
    "a bit": (bytes_of(FACTOR, lambda d: d[:-1] + bytes([d[-1] ^ 1])), f"{FACTOR}: wrong checksum"),
    "layers swapped": (swapped, LAYER),
    "a pickle that runs a command": (evil, "more than plain tensors"),
    "header of bytes": (bytes_of(HEADER, lambda d: b"\xff\xfe\x00"), f"{HEADER}: is not JSON"),
    "a changed number": (
        bytes_of(HEADER, lambda d: d.replace(b'"steps": 4', b'"steps": 5')),
        f"{HEADER}: wrong checksum",
    ),
}
PAYLOADS: Table = {
    "NaN": (packed(lambda P: first_is(NAN, P)), "is not finite"),
    "negative diagonal": (packed(lambda P: first_is(-1e6, P)), "negative diagonal"),
    "float64": (packed(torch.Tensor.double), "packed is float64 [210], but when"),
    "sparse": (packed(torch.Tensor.to_sparse), "is torch.sparse_coo float32"),
    "too short": (packed(lambda P: P[:-3].clone()), "packed is float32 [207]"),
    "updates negative": (
        payload(FACTOR, lambda p: p.update(updates=torch.tensor(-1.0))),
        "updates is negative",
    ),
    "key missing": (
        payload(FACTOR, lambda p: {key: p[key] for key in p if key != "history"}),
        "history is not there",
    ),
    "key too many": (payload(LAYER, lambda p: p.update(more=1)), "more is int"),
    "NaN in eigenvectors": (
        payload(LAYER, lambda p: p["A"].update(eigenvectors=first_is(NAN, p["A"]["eigenvectors"]))),
        "A.eigenvectors is not finite",
    ),
    "transposed": (
        payload(LAYER, lambda p: p.update(A=p["G"], G=p["A"])),
        f"{LAYER}: A.eigenvalues is",
    ),
    "no side": (payload(LAYER, lambda p: p.update(A=None)), "A is NoneType"),
    "no table": (
        payload(LAYER, lambda p: [p["terms"]]),
        " is list, but when it was written it was dict",
    ),
}
HEADERS: dict[str, tuple[Callable[[dict], object], str]] = {
    "an older format": (lambda h: h.pop("format"), "another version of ds_kfac wrote this save"),
    "a newer format": (lambda h: h.update(format=3, more=1), "its format is 3, and this version"),
    "header with more": (lambda h: h.update(more=1), f"{HEADER}: more is unknown"),
    "steps negative": (lambda h: h.update(steps=-4), f"{HEADER}: steps"),
    "another method": (lambda h: h.update(method="root"), "must be one of eigen, inverse"),
    "clocks too short": (
        lambda h: h["timetable"].update(factors={"head/A": [1]}),
        f"{HEADER}: timetable",
    ),
    "another save's header": (
        lambda h: h.update(save_id="0123456789ab"),
        "belongs to save 0123456789ab",
    ),
    "an id that is a path": (lambda h: h.update(save_id="../../etc"), f"{HEADER}: save_id"),
    "a file not listed": (
        lambda h: h["files"].pop(FACTOR),
        "does not say that it holds head/A",
    ),
    "a file listed as another": (
        lambda h: h["files"][FACTOR].update(holds="middle/A"),
        "does not say that it holds head/A",
    ),
    "a name that leads out": (leads_out, f"does not say that it holds {OUT}/A"),
    "a factor of another size": (
        lambda h: h["factors"].update({"head/A": [21, 21]}),
        "needs 210",
    ),
    "a layer of another size": (
        lambda h: h["layers"]["middle"].update(A=[5, 5]),
        "in this model and config it is dense, 17 wide",
    ),
    "a layer kept otherwise": (
        lambda h: h["layers"]["middle"].update(A=[17, 1]),
        "was diagonal, 17 wide",
    ),
}
DAMAGES: Table = {**FILES, **PAYLOADS}
DAMAGES |= {name: (header(change), words) for name, (change, words) in HEADERS.items()}
"""Loaded by its save id, as DeepSpeed's files name it."""


def moved_behind_a_link(folder: Path) -> None:
    (folder / FACTOR).rename(folder / "moved")
    (folder / FACTOR).symlink_to(folder / "moved")


def latest(content: bytes) -> Damage:
    return lambda folder: (folder.parent / "latest").write_bytes(content)


HARMLESS: dict[str, Damage] = {
    "a link to the same": moved_behind_a_link,
    "files of others": lambda f: (f / "notes.txt").write_text("x"),
    "header in other words": bytes_of(HEADER, lambda d: json.dumps(json.loads(d)).encode()),
    "latest missing": lambda f: (f.parent / "latest").unlink(),
}
"""The state loads, and is the same."""
LATEST: Table = {
    "missing": (HARMLESS["latest missing"], NO_STATE),
    "empty": (latest(b""), NO_STATE),
    "points nowhere": (latest(b"0123456789ab"), NO_STATE),
    "a path": (lambda f: latest(f"../../tag/kfac/{f.name}".encode())(f), NO_STATE),
    "bytes": (latest(b"\xff\xfe"), NO_STATE),
}
"""Loaded without an id."""
