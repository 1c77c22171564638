"""Everything that can be wrong with the folder of a save: what is done to it, and what has to be
said of it.

:func:`repaired` and :func:`header` write a changed payload or header with checksums that fit it
again: what a bug, or a file put together by hand, would leave.
"""

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

FACTOR, LAYER, OTHER, HEADER = (
    "head.A.factor.pt",
    "middle.layer.pt",
    "first.layer.pt",
    "header.json",
)
Damage = Callable[[Path], object]
NAN = float("nan")


# files that are not there, are no files, or are not as they were written


def removed(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def becomes(file: str, make: Callable[[Path], object]) -> Damage:
    """Another thing of that name."""

    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


def bytes_of(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def flipped(data: bytes) -> bytes:
    """With another last bit."""
    return data[:-1] + bytes([data[-1] ^ 1])


def swapped(one: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
        (folder / one).write_bytes(second)
        (folder / other).write_bytes(first)

    return damage


# files whose checksums fit


def header_of(folder: Path) -> dict:
    return json.loads((folder / HEADER).read_text())["header"]


def write_header(folder: Path, header: dict) -> None:
    crc32 = zlib.crc32(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    (folder / HEADER).write_text(json.dumps({"crc32": crc32, "header": header}))


def header(*place: str, **values) -> Damage:
    """These values in the header, or in its table at a place."""

    def damage(folder: Path) -> None:
        content = table = header_of(folder)
        for key in place:
            table = table[key]
        table.update(values)
        write_header(folder, content)

    return damage


def without(*place: str) -> Damage:
    """The header without what is at a place."""

    def damage(folder: Path) -> None:
        content = table = header_of(folder)
        for key in place[:-1]:
            table = table[key]
        del table[place[-1]]
        write_header(folder, content)

    return damage


def write_data(folder: Path, file: str, data: bytes) -> None:
    content = header_of(folder)
    content["files"][file] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / file).write_bytes(data)
    write_header(folder, content)


def repaired(file: str, change: Callable[[dict], dict]) -> Damage:
    """The payload that ``change`` returns."""

    def damage(folder: Path) -> None:
        payload = change(torch.load(folder / file))
        torch.save(payload, folder / file)
        write_data(folder, file, (folder / file).read_bytes())

    return damage


def packed(change: Callable[[torch.Tensor], object]) -> Damage:
    """Another average in a factor's file."""
    return repaired(FACTOR, lambda payload: payload | {"packed": change(payload["packed"])})


def element(index: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return change


def not_finite_inside(payload: dict) -> dict:
    payload["A"]["eigenvectors"].view(-1)[5] = NAN
    return payload


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return os.system, (f"touch {Evil.trace}",)

    trace = ""


def evil(folder: Path) -> None:
    Evil.trace = str(folder.parent.parent / "executed")
    write_data(folder, FACTOR, pickle.dumps(Evil()))


def led_by(name: str) -> Damage:
    """``first`` has the A of a layer whose name would lead out of the folder, were it a path."""

    def damage(folder: Path) -> None:
        content = header_of(folder)
        content["shared"] = [[name, "first"]]
        content["factors"][f"{name}/A"] = content["factors"]["first/A"]
        write_header(folder, content)

    return damage


NO_STATE = "no K-FAC state"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "factor missing": (removed(FACTOR), f"{FACTOR}: is missing"),
    "header missing": (removed(HEADER), NO_STATE),
    "a link to itself": (becomes(LAYER, lambda p: p.symlink_to(p)), LAYER),
    "a pipe": (becomes(LAYER, os.mkfifo), f"{LAYER}: is no file"),
    "empty": (bytes_of(FACTOR, lambda data: b""), f"{FACTOR}: has 0 bytes"),
    "cut": (bytes_of(LAYER, lambda data: data[:-1]), f"{LAYER}: has"),
    "a bit": (bytes_of(FACTOR, flipped), f"{FACTOR}: wrong checksum"),
    "layers swapped": (swapped(LAYER, OTHER), LAYER),
    # payloads
    "NaN": (packed(element(3, NAN)), "is not finite"),
    "negative diagonal": (packed(element(0, -1e6)), "negative diagonal"),
    "float64": (packed(torch.Tensor.double), "packed is float64 [210], but when"),
    "sparse": (packed(torch.Tensor.to_sparse), "is torch.sparse_coo float32"),
    "too short": (packed(lambda P: P[:-3].clone()), "packed is float32 [207]"),
    "updates negative": (
        repaired(FACTOR, lambda p: p | {"updates": torch.tensor(-1.0)}),
        "updates is negative",
    ),
    "key missing": (
        repaired(FACTOR, lambda p: {key: p[key] for key in p if key != "history"}),
        "history is not there",
    ),
    "key too many": (repaired(LAYER, lambda p: p | {"more": 1}), "more is int"),
    "NaN in eigenvectors": (
        repaired(LAYER, not_finite_inside),
        "A.eigenvectors is not finite",
    ),
    "transposed": (
        repaired(LAYER, lambda p: p | {"A": p["G"], "G": p["A"]}),
        f"{LAYER}: A.eigenvalues is",
    ),
    "no side": (repaired(LAYER, lambda p: p | {"A": None}), "A is NoneType"),
    "no table": (
        repaired(LAYER, lambda p: [p["terms"]]),
        " is list, but when it was written it was dict",
    ),
    "a pickle that runs a command": (evil, "more than plain tensors"),
    # the header
    "header of bytes": (bytes_of(HEADER, lambda data: b"\xff\xfe\x00"), f"{HEADER}: is no JSON"),
    "a changed number": (
        bytes_of(HEADER, lambda data: data.replace(b'"steps": 4', b'"steps": 5')),
        f"{HEADER}: wrong checksum",
    ),
    "an older format": (without("format"), "another version of ds_kfac wrote this save"),
    "a newer format": (
        header(format=3, more=1),
        "its format is 3, and this version reads format",
    ),
    "header with more": (header(more=1), f"{HEADER}: more is unknown"),
    "steps negative": (header(steps=-4), f"{HEADER}: steps"),
    "another method": (header(method="root"), "must be one of eigen, inverse"),
    "clocks too short": (
        header("timetable", factors={"head/A": [1]}),
        f"{HEADER}: timetable",
    ),
    "another save's header": (header(save_id="0123456789ab"), "is of save 0123456789ab"),
    "an id that is a path": (header(save_id="../../etc"), f"{HEADER}: save_id"),
    "a file not listed": (without("files", FACTOR), "does not say that it holds head/A"),
    "a file listed as another": (
        header("files", FACTOR, holds="middle/A"),
        "does not say that it holds head/A",
    ),
    "a name that leads out": (
        led_by("../../../whole/kfac/x"),
        "does not say that it holds ../../../whole/kfac/x/A",
    ),
    "a factor of another size": (header("factors", **{"head/A": [21, 21]}), "needs 210"),
    "a layer of another size": (
        header("layers", "middle", A=[5, 5]),
        "in this model and config it is dense, 17 wide",
    ),
    "a layer kept otherwise": (header("layers", "middle", A=[17, 1]), "was diagonal, 17 wide"),
}
"""Loaded by its save id, as DeepSpeed's files name it."""

HARMLESS: dict[str, Damage] = {
    "a link to the same": lambda f: (
        (f / FACTOR).rename(f / "moved"),
        (f / FACTOR).symlink_to(f / "moved"),
    ),
    "files of others": lambda f: (f / "notes.txt").write_text("x"),
    "header in other words": bytes_of(HEADER, lambda data: json.dumps(json.loads(data)).encode()),
    "latest missing": lambda f: (f.parent / "latest").unlink(),
}
"""The state loads, and is the same."""


def latest(content: bytes) -> tuple[Damage, str]:
    return lambda folder: (folder.parent / "latest").write_bytes(content), NO_STATE


LATEST: dict[str, tuple[Damage, str]] = {
    "missing": (HARMLESS["latest missing"], NO_STATE),
    "empty": latest(b""),
    "points nowhere": latest(b"0123456789ab"),
    "a path": (
        lambda f: (f.parent / "latest").write_text(f"../../tag/kfac/{f.name}"),
        NO_STATE,
    ),
    "bytes": latest(b"\xff\xfe"),
}
"""Loaded without an id."""
