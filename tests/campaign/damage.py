"""Checkpoints whose K-FAC part is damaged, and DeepSpeed's part is whole: refused, or harmless to the bit.

Kinds that know nothing of the format are here; those of the format are the tests' own table, where there is one.
"""

import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from tests.campaign.engines import anywhere, is_finite, weights
from tests.campaign.harness import CRASH, LOUD, SILENT, SURVIVED, Case, Outcome
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train

MODE, KFAC = "z2", {"factor": {"update_interval": 1, "fisher": "empirical"}, "eigenbasis": {"refresh_interval": 3}}
EARLY, BETWEEN, FURTHER = 1, 3, 4
"""Steps before the older save, between the two (its refresh_interval, so that bases differ, too), and after them."""
TABLE = "tests.deepspeed.damages"


def _factor(folder: Path) -> Path:
    return min(folder.glob("*.A.factor.pt"))


def _layers(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.pt") if ".factor." not in path.name)


def _bytes(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _flip(data: bytes, part: float) -> bytes:
    place = int(part * (len(data) - 1))
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second), other.write_bytes(first)


def _tensor(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first matrix or vector of a payload."""
    payload = torch.load(path)
    key = next(key for key, value in payload.items() if isinstance(value, torch.Tensor) and value.numel() > 1)
    torch.save({**payload, key: change(payload[key].clone())}, path)


def _first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_fill_(0, torch.tensor([0]), value)


def _header(folder: Path, change: Callable[[str], str]) -> None:
    (folder / "header.json").write_text(change((folder / "header.json").read_text()))


KINDS: dict[str, Callable[[Path], object]] = {
    "factor missing": lambda f: _factor(f).unlink(),
    "layer missing": lambda f: _layers(f)[0].unlink(),
    "folder of the save missing": shutil.rmtree,
    "folder of all saves missing": lambda f: shutil.rmtree(f.parent),
    "factor empty": lambda f: _bytes(_factor(f), lambda data: b""),
    "factor cut": lambda f: _bytes(_factor(f), lambda data: data[: len(data) // 2]),
    "layer cut at the end": lambda f: _bytes(_layers(f)[0], lambda data: data[:-20]),
    "layer longer": lambda f: _bytes(_layers(f)[0], lambda data: data + b"x"),
    "factor is text": lambda f: _factor(f).write_text("no tensor"),
    "layers swapped": lambda f: _swap(*_layers(f)[:2]),
    "A and G swapped": lambda f: _swap(_factor(f), min(f.glob("*.G.factor.pt"))),
    "factors of two layers swapped": lambda f: _swap(*sorted(f.glob("*.A.factor.pt"))[:2]),
    "factor of an older save": lambda f: shutil.copy(f.parents[2] / "other" / _factor(f).name, _factor(f)),
    "layer of an older save": lambda f: shutil.copy(f.parents[2] / "other" / _layers(f)[0].name, _layers(f)[0]),
    "NaN in a factor": lambda f: _tensor(_factor(f), _first(float("nan"))),
    "inf in a factor": lambda f: _tensor(_factor(f), _first(float("inf"))),
    "another number in a factor": lambda f: _tensor(_factor(f), _first(7.0)),
    "a factor of float64": lambda f: _tensor(_factor(f), torch.Tensor.double),
    "a factor of another shape": lambda f: _tensor(_factor(f), lambda tensor: tensor[:-1].clone()),
    "header missing": lambda f: (f / "header.json").unlink(),
    "header empty": lambda f: _header(f, lambda text: ""),
    "header cut": lambda f: _header(f, lambda text: text[: len(text) // 2]),
    "header with another step": lambda f: _header(f, lambda text: text.replace('"steps": 4', '"steps": 9')),
    "header without a layer": lambda f: _header(f, lambda text: text.replace('"middle"', '"gone"')),
    "file named latest missing": lambda f: (f.parent / "latest").unlink(),
    "a foreign file": lambda f: (f / "notes.txt").write_text("x"),
} | {
    f"a bit of the {what} at {part:.0%}": lambda f, pick=pick, part=part: _bytes(pick(f), lambda d: _flip(d, part))
    for what, pick in (("factor", _factor), ("layer", lambda f: _layers(f)[0]))
    for part in (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
}  # fmt: skip


def table() -> dict[str, Callable[[Path], object]]:
    """All kinds."""
    if importlib.util.find_spec(TABLE) is None:
        return KINDS
    module = importlib.import_module(TABLE)
    own = {name: damage for name, (damage, _) in module.DAMAGES.items()} | module.HARMLESS
    return KINDS | {f"of the format, {name}": damage for name, damage in own.items()}


def cases() -> list[Case]:
    return [Case("damage", name, "tests.campaign.damage:run", name) for name in table()]


@cache
def _whole() -> tuple[Path, list[float]]:
    """A checkpoint, a K-FAC state of an earlier step next to it, and the losses of the run that goes on. Collective."""
    place = [tempfile.mkdtemp(prefix="campaign-damage", dir=_room())]
    dist.broadcast_object_list(place)
    root, rank = Path(place[0]), dist.get_rank()
    engine = build(BY_NAME[MODE], 1, kfac=KFAC)
    train(engine, 1, steps=EARLY)
    engine.save_checkpoint(str(root / "early"), tag="tag")
    train(engine, 1, steps=BETWEEN, first=EARLY)
    engine.save_checkpoint(str(root / "whole"), tag="tag")
    dist.barrier()
    if rank == 0:
        shutil.copytree(_save_of(root / "early"), root / "whole" / "other")
        (root / "whole").rename(root / "kept")  # where it was saved it is looked for, if its folder is gone
    losses = train(engine, 1, steps=FURTHER, first=EARLY + BETWEEN)
    engine.destroy()
    return root, losses


def _room() -> str:
    """Where a session's leftovers go with it."""
    return str(Path(os.readlink("/proc/self/fd/1")).parent)


def _save_of(root: Path) -> Path:
    return next(path for path in (root / "tag/kfac").iterdir() if path.is_dir())


def run(name: str) -> Outcome:
    root, expected = _whole()
    damaged = root / "damaged"
    if dist.get_rank() == 0:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(root / "kept", damaged)
        table()[name](_save_of(damaged))
    dist.barrier()
    engine = build(BY_NAME[MODE], 1, seed=99, kfac=KFAC)
    error = ""
    try:
        engine.load_checkpoint(str(damaged), tag="tag")
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    errors = [text for text in anywhere([error]) if text]
    if errors:
        engine.destroy()
        text = errors[0].replace(str(damaged), "")
        if len(errors) < dist.get_world_size():
            return CRASH, f"on {len(errors)} rank only: {text}"
        return (LOUD if "ds_kfac" in text else CRASH), text
    losses = train(engine, 1, steps=FURTHER, first=EARLY + BETWEEN)
    finite = is_finite(weights(engine))
    engine.destroy()
    if losses == expected and finite:
        return SURVIVED, "loads, and trains on to the bit"
    return SILENT, f"loads without a word; losses {json.dumps(losses[-2:])} instead of {json.dumps(expected[-2:])}"
