"""A pass over data that can be killed: sums so far in shards, and a file that names the last whole set of them."""

import functools
import hashlib
import inspect
import json
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.checkpoint.files import write_text
from ds_kfac.comm.message import Channel, failing_together
from ds_kfac.factors.files import FactorsError, Shard, crc32, write_shard

PROGRESS, MARK, PHASES = "progress.json", "mark", ("factors", "corrected")
SAVE_SECONDS = 300.0
"""Between saves."""


def named(function: Any) -> str:
    """What tells a function from others, also from one of the same name: its code and constants, and the plain values,
    tensors and functions that it holds or finds in its module; of an object, its class and those among its attributes.
    """
    if function is None:
        return "its own"
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} {fingerprint(_content(function, 0, []))}"


DEPTH = 8
"""Of what is looked into for :func:`named`."""


def _content(value: Any, depth: int, seen: list[Any]) -> Any:
    """As JSON has it, the same in every process. ``seen``: functions and objects that were looked into already."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if depth > DEPTH:
        return "..."

    def of(*values: Any) -> list[Any]:
        return [_content(part, depth + 1, seen) for part in values]

    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), crc32(value)]
    if isinstance(value, tuple | list):
        return of(*value)
    if isinstance(value, set | frozenset):
        return sorted(map(json.dumps, of(*value)))
    if isinstance(value, Mapping):
        return [of(*pair) for pair in value.items()]
    if isinstance(value, functools.partial):
        return of(value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return of(value.__func__, value.__self__)
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), *of(value.co_consts, value.co_names)]
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, type) or any(value is other for other in seen):
        return name
    seen.append(value)
    if isinstance(value, types.FunctionType):
        found = inspect.getclosurevars(value)
        own = {key: x for key, x in sorted(found.globals.items()) if not isinstance(x, types.ModuleType)}
        return of(value.__code__, value.__defaults__, value.__kwdefaults__, found.nonlocals, own)
    inside = any(not isinstance(other, types.FunctionType) for other in seen[:-1])  # an object of an object
    return [name, *of({} if inside else {k: x for k, x in getattr(value, "__dict__", {}).items() if k[:1] != "_"})]


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise FactorsError where a folder is of other settings or data. ``data`` follows only from reading it all."""
    if differ := _different(before["settings"], now["settings"]):
        raise FactorsError(f"{folder}: holds factors of other settings ({differ}); give another folder, or remove it")
    if before["data"] != now["data"]:
        raise FactorsError(
            f"{folder}: holds factors of other data, or of its batches in another order; give another folder, or "
            "remove it"
        )


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first setting that differs, in words; "" if none does."""
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            was, is_now = (str(own.get(key))[:80] for own in (before, now))
            return f"{key} was {was}, is {is_now}"
    return ""


def fingerprint(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Progress:
    """What of a job is done. Every rank has one; what they say is the same on all.

    Attributes:
        phase: "factors", "corrected".
        batches: of this phase that are in the sums of the last save.
        seen: numbers that go with them, as many as the job has.
        mark: of this rank's batches in them, by which other data, or another order, shows.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], channel: Channel) -> None:
        """Collective. Raises FactorsError on every rank if the folder is of other settings."""
        self.folder, self.channel, self.settings = folder, channel, dict(settings)
        self.phase, self.batches, self.seen, self._save = "factors", 0, [0.0, 0.0, 0.0], 0
        self._last, self.mark = time.monotonic(), 0
        with failing_together(f"ds_kfac: {folder}", channel.group, FactorsError):
            found = self._read()
            if found is not None:
                if differ := _different(found["settings"], self.settings):
                    raise FactorsError(
                        f"holds an unfinished run with other settings ({differ}); give another folder, or remove it"
                    )
                self.phase, self.batches, self.seen, self._save = (
                    found[key] for key in ("phase", "batches", "seen", "save")
                )
            probe = self.folder / f"probe-{channel.rank:05d}.safetensors"
            write_shard(probe, {})  # not only after the first pass
            probe.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / PROGRESS
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            whole = isinstance(found["settings"], dict) and len(found["seen"]) == 3 and found["phase"] in PHASES
            if not whole or found["save"] < 0 or found["batches"] < 0:
                raise ValueError("not what ds_kfac writes")
            return found
        except (ValueError, KeyError, TypeError) as problem:
            raise FactorsError(f"{path}: damaged ({problem}); remove the folder and start again") from problem

    @property
    def due(self) -> bool:
        """Whether this rank's clock says that it is time to save."""
        return time.monotonic() - self._last > SAVE_SECONDS

    def load(self, device: torch.device) -> dict[str, Tensor]:
        """This rank's sums of the last save; none if there was none in this phase. Collective."""
        found: dict[str, Tensor] = {}
        with failing_together(f"ds_kfac: {self.folder}", self.channel.group, FactorsError):
            if self.batches:
                path = self._shard(self._save)
                file = Shard(path)
                found = {name: file.tensor(name).to(device) for name in file.sums}
                self.mark = int(found.pop(MARK, 0))
        return found

    def save(self, batches: int, seen: list[float], mark: int, sums: Callable[[], Mapping[str, Tensor]]) -> None:
        """Keep the sums of so many batches. Collective; raises FactorsError on every rank if that fails on one."""
        number = self._save + 1
        with failing_together("ds_kfac: could not save", self.channel.group, FactorsError):
            write_shard(self._shard(number), {**sums(), MARK: torch.tensor(mark)})
        self._put(self.phase, batches, seen, number)

    def begin(self, phase: str) -> None:
        """The last phase is done, and its results are on disk. Collective."""
        self._put(phase, 0, self.seen, self._save + 1)

    def _put(self, phase: str, batches: int, seen: list[float], number: int) -> None:
        with failing_together("ds_kfac: could not save", self.channel.group, FactorsError):
            if self.channel.rank == 0:
                state = {"phase": phase, "batches": batches, "seen": seen, "save": number, "settings": self.settings}
                write_text(self.folder / PROGRESS, json.dumps(state, indent=1))
        old, self._save = self._save, number
        self.phase, self.batches, self.seen, self._last = phase, batches, seen, time.monotonic()
        self._shard(old).unlink(missing_ok=True)

    def finished(self) -> None:
        """The index is there. Local."""
        for old in self.folder.glob(f"partial-*-{self.channel.rank:05d}.safetensors*"):  # of killed saves, too
            old.unlink(missing_ok=True)
        if self.channel.rank == 0:
            (self.folder / PROGRESS).unlink(missing_ok=True)

    def _shard(self, number: int) -> Path:
        return self.folder / f"partial-{number:05d}-{self.channel.rank:05d}.safetensors"


def saved(folder: Path) -> str:
    """What another call of the command will do, in words."""
    try:
        found = json.loads((folder / PROGRESS).read_text())
        done, phase = int(found["batches"]), PHASES.index(found["phase"]) + 1
    except (OSError, ValueError, KeyError, TypeError):
        done, phase = 0, 1
    if not done and phase == 1:
        return (
            f"Nothing was saved yet (saves come every {SAVE_SECONDS / 60:.0f} minutes): the same command begins anew."
        )
    return f"The same command goes on from the last save: {done:,} batches of pass {phase} are done."
