"""Everything that can be wrong with the folder of a save: what is done to it, and what has to be
said of it.

``repaired`` writes a changed payload or header with checksums that fit it again: what a bug, or a
file put together by hand, would leave.
"""

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

FACTOR, LAYER, OTHER = "head.A.factor.pt", "middle.layer.pt", "first.layer.pt"


def flipped(file: str, part: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[min(int(part * len(data)), len(data) - 1)] ^= 0x10
        (folder / file).write_bytes(data)

    return damage


def cut(file: str, part: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(part * len(data))])

    return damage


def swapped(one: str, other: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
        (folder / one).write_bytes(second)
        (folder / other).write_bytes(first)

    return damage


def header_of(folder: Path) -> dict:
    return json.loads((folder / "header.json").read_text())


def write_header(folder: Path, header: dict) -> None:
    crc32 = zlib.crc32(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    content = {"crc32": crc32, "header": header}
    (folder / "header.json").write_text(json.dumps(content))


def header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = header_of(folder)["header"]
        change(content)
        write_header(folder, content)

    return damage


def repaired(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the payload, in place or by what ``change`` returns, and make the checksums fit."""

    def damage(folder: Path) -> None:
        payload = torch.load(folder / file)
        result = change(payload)
        torch.save(payload if result is None else result, folder / file)
        data, content = (folder / file).read_bytes(), header_of(folder)["header"]
        content["files"][file] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
        write_header(folder, content)

    return damage


def entry(file: str, index: int, value: float) -> Callable[[dict], None]:
    """An element of a factor's average or of a layer's eigenvectors."""

    def change(payload: dict) -> None:
        tensor = payload["packed"] if "packed" in payload else payload["A"]["eigenvectors"]
        tensor.view(-1)[index] = value

    return repaired(file, change)


def text(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "header.json").write_text(content) and None


def file_becomes(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return os.system, (f"touch {Evil.trace}",)

    trace = ""


def evil(folder: Path) -> None:
    Evil.trace = str(folder.parent.parent / "executed")
    data = pickle.dumps(Evil())
    (folder / FACTOR).write_bytes(data)
    content = header_of(folder)["header"]
    content["files"][FACTOR] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
    write_header(folder, content)


def led_by(name: str) -> Callable[[Path], None]:
    """``first`` has the A of a layer whose name would lead out of the folder, were it a path."""

    def change(content: dict) -> None:
        content["shared"] = [[name, "first"]]
        content["factors"][f"{name}/A"] = content["factors"]["first/A"]

    return header(change)


MISSING, CHECKSUM, HEADER = "is missing", "wrong checksum", "header.json"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    # files that are not there, or are no files
    "factor missing": (lambda f: (f / FACTOR).unlink(), f"{FACTOR}: {MISSING}"),
    "layer missing": (lambda f: (f / LAYER).unlink(), f"{LAYER}: {MISSING}"),
    "all files missing": (lambda f: [p.unlink() for p in f.glob("*.pt")], MISSING),
    "a folder": (file_becomes(FACTOR, Path.mkdir), f"{FACTOR}: is no file"),
    "a broken link": (
        file_becomes(FACTOR, lambda p: p.symlink_to("nowhere")),
        f"{FACTOR}: {MISSING}",
    ),
    "a link to itself": (file_becomes(LAYER, lambda p: p.symlink_to(p)), LAYER),
    "a pipe": (file_becomes(LAYER, os.mkfifo), f"{LAYER}: is no file"),
    # files that are not as they were written
    "empty": (cut(FACTOR, 0), f"{FACTOR}: has 0 bytes"),
    "cut in the middle": (cut(LAYER, 0.5), f"{LAYER}: has"),
    "last bytes missing": (cut(FACTOR, 0.999), f"{FACTOR}: has"),
    "longer": (lambda f: (f / FACTOR).open("ab").write(b"x"), f"{FACTOR}: has"),
    "a bit at the start": (flipped(FACTOR, 0.0), f"{FACTOR}: {CHECKSUM}"),
    "a bit in the middle": (flipped(FACTOR, 0.5), f"{FACTOR}: {CHECKSUM}"),
    "a bit at the end": (flipped(FACTOR, 1.0), f"{FACTOR}: {CHECKSUM}"),
    "a bit of a layer": (flipped(LAYER, 0.4), f"{LAYER}: {CHECKSUM}"),
    "layers swapped": (swapped(LAYER, OTHER), "middle.layer.pt"),
    "A and G swapped": (swapped(FACTOR, "head.G.factor.pt"), FACTOR),
    "factors swapped": (swapped(FACTOR, "middle.A.factor.pt"), FACTOR),
    "factor and layer swapped": (swapped(FACTOR, "head.layer.pt"), FACTOR),
    "another save's file": (
        lambda f: (f / FACTOR).write_bytes((f.parents[2] / "other" / FACTOR).read_bytes()),
        f"{FACTOR}: {CHECKSUM}",
    ),
    # files whose checksums fit
    "NaN": (entry(FACTOR, 3, float("nan")), "is not finite"),
    "infinite": (entry(FACTOR, -1, float("inf")), "is not finite"),
    "NaN in eigenvectors": (entry(LAYER, 5, float("nan")), "A.eigenvectors is not finite"),
    "negative diagonal": (entry(FACTOR, 0, -1e6), "negative diagonal"),
    "float64": (
        repaired(FACTOR, lambda p: p.update(packed=p["packed"].double())),
        "packed is float64 [210], when",
    ),
    "bf16": (repaired(FACTOR, lambda p: p.update(packed=p["packed"].bfloat16())), "bfloat16"),
    "integers": (repaired(FACTOR, lambda p: p.update(packed=p["packed"].long())), "int64"),
    "a number": (repaired(FACTOR, lambda p: p.update(packed=3.0)), "packed is float, when"),
    "sparse": (
        repaired(FACTOR, lambda p: p.update(packed=p["packed"].to_sparse())),
        "is torch.sparse_coo float32",
    ),
    "too short": (
        repaired(FACTOR, lambda p: p.update(packed=p["packed"][:-3].clone())),
        "packed is float32 [207]",
    ),
    "a row of it": (repaired(FACTOR, lambda p: p.update(packed=p["packed"][None])), "[1, 210]"),
    "transposed": (
        repaired(LAYER, lambda p: p.update(A=p["G"], G=p["A"])),
        f"{LAYER}: A.eigenvalues is",
    ),
    "vectors missing": (
        repaired(LAYER, lambda p: p.update(A={"eigenvalues": p["A"]["eigenvalues"]})),
        "A.eigenvectors is not there",
    ),
    "too many vectors": (
        repaired(LAYER, lambda p: p["A"].update(eigenvectors=torch.ones(8))),
        "A.eigenvectors is float32 [8]",
    ),
    "updates negative": (
        repaired(FACTOR, lambda p: p.update(updates=torch.tensor(-1.0))),
        "updates is negative",
    ),
    "key missing": (repaired(FACTOR, lambda p: p.pop("history") and None), "history is not there"),
    "key too many": (repaired(LAYER, lambda p: p.update(more=1)), "more is int"),
    "no table": (
        repaired(LAYER, lambda p: [p["terms"]]),
        " is list, when it was written it was dict",
    ),
    "another layer's payload": (
        repaired(LAYER, lambda p: {**p, "A": None, "G": None, "terms": torch.ones(2)}),
        "A is NoneType",
    ),
    "a pickle that runs a command": (evil, "more than plain tensors"),
    # the header
    "header missing": (lambda f: (f / "header.json").unlink(), "no K-FAC state"),
    "header empty": (text(""), f"{HEADER}: is no JSON"),
    "header cut": (cut(HEADER, 0.5), f"{HEADER}: is no JSON"),
    "header of bytes": (
        lambda f: (f / HEADER).write_bytes(b"\xff\xfe\x00"),
        f"{HEADER}: is no JSON",
    ),
    "header a list": (text("[]"), CHECKSUM),
    "a changed number": (
        lambda f: (f / HEADER).write_text(
            (f / HEADER).read_text().replace('"steps": 4', '"steps": 5')
        ),
        f"{HEADER}: {CHECKSUM}",
    ),
    "an older format": (
        header(lambda h: h.pop("format")),
        "another version of ds_kfac wrote this save",
    ),
    "a newer format": (
        header(lambda h: h.update(format=3, more=1)),
        "its format is 3, and this version reads format",
    ),
    "header without steps": (header(lambda h: h.pop("steps")), f"{HEADER}: steps"),
    "header with more": (header(lambda h: h.update(more=1)), f"{HEADER}: more"),
    "steps a text": (header(lambda h: h.update(steps="4")), f"{HEADER}: steps"),
    "steps negative": (header(lambda h: h.update(steps=-4)), f"{HEADER}: steps"),
    "files a list": (header(lambda h: h.update(files=[])), f"{HEADER}: files"),
    "clocks too short": (
        header(lambda h: h["timetable"].update(factors={"head/A": [1]})),
        f"{HEADER}: timetable",
    ),
    "another save's header": (
        header(lambda h: h.update(save_id="0123456789ab")),
        "is of save 0123456789ab",
    ),
    "an id that is a path": (header(lambda h: h.update(save_id="../../etc")), f"{HEADER}: save_id"),
    "a file not listed": (
        header(lambda h: h["files"].pop(FACTOR)),
        "does not say that it holds head/A",
    ),
    "a file listed as another": (
        header(lambda h: h["files"][FACTOR].update(holds="middle/A")),
        "does not say that it holds head/A",
    ),
    "a name that leads out": (
        led_by("../../../whole/kfac/x"),
        "does not say that it holds ../../../whole/kfac/x/A",
    ),
    "a name that is absolute": (led_by("/etc/passwd"), "does not say that it holds /etc/passwd/A"),
    "a factor of another size": (
        header(lambda h: h["factors"].update({"head/A": [21, 21]})),
        "needs 210",
    ),
    "a layer of another size": (
        header(lambda h: h["layers"]["middle"].update(A=[5, 5])),
        "of this model and config it is dense, 17 wide",
    ),
    "a layer kept otherwise": (
        header(lambda h: h["layers"]["middle"].update(A=[17, 1])),
        "was diagonal, 17 wide",
    ),
}
"""Loaded by its save id, as DeepSpeed's files name it."""

HARMLESS: dict[str, Callable[[Path], object]] = {
    "a link to the same": lambda f: (
        (f / FACTOR).rename(f / "moved"),
        (f / FACTOR).symlink_to(f / "moved"),
    ),
    "files of others": lambda f: (f / "notes.txt").write_text("x"),
    "header in other words": lambda f: (f / HEADER).write_text(
        json.dumps(json.loads((f / HEADER).read_text()))
    ),
    "latest missing": lambda f: (f.parent / "latest").unlink(),
}
"""The state loads, and is the same."""

LATEST: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f.parent / "latest").unlink(), "no K-FAC state"),
    "empty": (lambda f: (f.parent / "latest").write_text(""), "no K-FAC state"),
    "points nowhere": (
        lambda f: (f.parent / "latest").write_text("0123456789ab"),
        "no K-FAC state",
    ),
    "a path": (
        lambda f: (f.parent / "latest").write_text(f"../../tag/kfac/{f.name}"),
        "no K-FAC state",
    ),
    "bytes": (lambda f: (f.parent / "latest").write_bytes(b"\xff\xfe"), "no K-FAC state"),
}
"""Loaded without an id."""
