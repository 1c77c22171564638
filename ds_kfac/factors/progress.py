"""A pass over data that can be killed: sums so far in shards, and a file that names the last whole set of them."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.checkpoint.files import write_text
from ds_kfac.comm.message import Channel, failing_together
from ds_kfac.factors.files import FactorsError, safetensors, write_shard

PROGRESS, MARK = "progress.json", "mark"
SAVE_SECONDS = 300.0
"""Between saves."""


def fingerprint(settings: Mapping[str, Any]) -> str:
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
        self._last, self.mark = time.monotonic(), 0.0
        with failing_together(f"ds_kfac: {folder}", channel.group, FactorsError):
            found = self._read()
            if found is not None:
                before = found["settings"]
                differ = [key for key in {**before, **self.settings} if before.get(key) != self.settings.get(key)]
                if differ:
                    key = differ[0]
                    was, now = (str(own.get(key))[:60] for own in (before, self.settings))
                    raise FactorsError(
                        f"holds an unfinished run with other settings ({key} was {was}, is {now}); give another "
                        "folder, or remove it"
                    )
                self.phase, self.batches, self.seen, self._save = (
                    found[key] for key in ("phase", "batches", "seen", "save")
                )

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / PROGRESS
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            return found if isinstance(found["settings"], dict) and found["save"] >= 0 else None
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
                try:
                    found = safetensors().load_file(str(path), device=str(device))
                except Exception as problem:
                    raise FactorsError(f"{path}: {problem}; remove the folder and start again") from problem
                self.mark = float(found.pop(MARK, 0.0))
        return found

    def save(self, batches: int, seen: list[float], mark: float, sums: Callable[[], Mapping[str, Tensor]]) -> None:
        """Keep the sums of so many batches. Collective; raises FactorsError on every rank if that fails on one."""
        number = self._save + 1
        with failing_together("ds_kfac: could not save", self.channel.group, FactorsError):
            write_shard(self._shard(number), {**sums(), MARK: torch.tensor(mark, dtype=torch.float64)})
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
