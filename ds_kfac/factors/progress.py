"""Saves of a pass over data that may be killed: shards of sums, and a file that names the last whole set."""

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
"""Seconds between saves."""


def named(function: Any) -> str:
    """A function's name with a fingerprint of its code and constants, and of plain values, tensors and functions that
    it holds or finds in its module; for an object, of its class and such attributes."""
    if function is None:
        return "its own"
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} {fingerprint(_content(function, 0, []))}"


DEPTH = 8
"""Most levels that :func:`named` looks into."""


def _content(value: Any, depth: int, seen: list[Any]) -> Any:
    """JSON that is the same in every process. ``seen``: functions and objects that were looked into already."""
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
        names = inspect.getclosurevars(value)
        outside = {key: x for key, x in sorted(names.globals.items()) if not isinstance(x, types.ModuleType)}
        return of(value.__code__, value.__defaults__, value.__kwdefaults__, names.nonlocals, outside)
    inside = any(not isinstance(other, types.FunctionType) for other in seen[:-1])  # an attribute of an object
    return [name, *of({} if inside else {k: x for k, x in getattr(value, "__dict__", {}).items() if k[:1] != "_"})]


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise FactorsError if a folder is of other "settings" or "data"; that of an unfinished run has no data yet."""
    what, advice = "factors" if "data" in before else "an unfinished run", "give another folder, or remove it"
    was, settings = before["settings"], now["settings"]
    for key in {**was, **settings}:
        if was.get(key) != settings.get(key):
            change = f"{key} was {str(was.get(key))[:80]}, is {str(settings.get(key))[:80]}"
            raise FactorsError(f"holds {what} of other settings ({change}); {advice}")
    if before.get("data") != now.get("data"):
        raise FactorsError(f"holds {what} of other data, or of its batches in another order; {advice}")


def fingerprint(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Progress:
    """What has been saved of a job; the same on every rank but for ``mark``.

    Attributes:
        phase: "factors" or "corrected".
        batches: number of this phase's batches in the last save.
        seen: [batches, sequences, rows] that all ranks have had.
        mark: checksum of this rank's batches in the last save, which shows other data or another order.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], channel: Channel) -> None:
        """Collective. Raises FactorsError on every rank if the folder is of other settings."""
        self.folder, self.channel, self.settings = folder, channel, dict(settings)
        self.phase, self.batches, self.seen, self._save = "factors", 0, [0.0, 0.0, 0.0], 0
        self._last, self.mark = time.monotonic(), 0
        with failing_together(f"ds_kfac: {folder}", channel.group, FactorsError):
            saved = self._read()
            if saved is not None:
                check_same(saved, {"settings": self.settings})
                self.phase, self.batches, self.seen, self._save = (
                    saved[key] for key in ("phase", "batches", "seen", "save")
                )
            probe = self.folder / f"probe-{channel.rank:05d}.safetensors"
            write_shard(probe, {})  # a folder that cannot be written to is an error now, not after the first pass
            probe.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / PROGRESS
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_text())
            whole = isinstance(saved["settings"], dict) and len(saved["seen"]) == 3 and saved["phase"] in PHASES
            if not whole or saved["save"] < 0 or saved["batches"] < 0:
                raise ValueError("not what ds_kfac writes")
            return saved
        except (ValueError, KeyError, TypeError) as problem:
            raise FactorsError(f"{path}: damaged ({problem}); remove the folder and start again") from problem

    @property
    def due(self) -> bool:
        """Whether it is time to save, by this rank's clock."""
        return time.monotonic() - self._last > SAVE_SECONDS

    def load(self, device: torch.device) -> dict[str, Tensor]:
        """This rank's sums in the last save; empty if this phase has none. Collective."""
        sums: dict[str, Tensor] = {}
        with failing_together(f"ds_kfac: {self.folder}", self.channel.group, FactorsError):
            if self.batches:
                file = Shard(self._shard(self._save))
                sums = {name: file.tensor(name).to(device) for name in file.sums}
                self.mark = int(sums.pop(MARK, 0))
        return sums

    def save(self, batches: int, seen: list[float], mark: int, sums: Callable[[], Mapping[str, Tensor]]) -> None:
        """Save the sums of this many batches. Collective; raises FactorsError on every rank if it fails on one."""
        number = self._save + 1
        with failing_together("ds_kfac: could not save", self.channel.group, FactorsError):
            write_shard(self._shard(number), {**sums(), MARK: torch.tensor(mark, device="cpu")})
        self._put(self.phase, batches, seen, number)

    def begin(self, phase: str) -> None:
        """Begin a phase; the results of the last one are on disk. Collective."""
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
        """Remove saves, once the index is written. Local."""
        for old in self.folder.glob(f"partial-*-{self.channel.rank:05d}.safetensors*"):  # also of killed saves
            old.unlink(missing_ok=True)
        if self.channel.rank == 0:
            (self.folder / PROGRESS).unlink(missing_ok=True)

    def _shard(self, number: int) -> Path:
        return self.folder / f"partial-{number:05d}-{self.channel.rank:05d}.safetensors"
