"""Names the ranks that made a collective fail: the backends' errors name neither a rank nor what
was exchanged.

Ranks meet in the job's store. One that raises in K-FAC's step leaves a note there. One whose
collective fails reads the notes and registers as waiting: ranks that do not register have died, or
are elsewhere in the program.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed

NOTE, WAITING = "ds_kfac/note", "ds_kfac/waiting"
PATIENCE = 3.0
"""Seconds that a rank whose collective failed waits for others to register."""


_noted = False  # whether this rank's note is there


class LostRank(RuntimeError):
    """A collective of K-FAC failed."""


@contextmanager
def telling(where: Callable[[], str]) -> Iterator[None]:
    """Wraps a step: an error on this rank is noted for the others, which wait, until it has made a
    step again. ``where``: text of what it did."""
    global _noted
    try:
        yield
        if _noted:
            with suppress(Exception):
                _noted = not _store().delete_key(f"{NOTE}/{torch.distributed.get_rank()}")
    except LostRank:
        raise
    except Exception as error:
        with suppress(Exception):  # the job may have lost its store, too
            rank, text = torch.distributed.get_rank(), f"{type(error).__name__}: {error}"
            _store().set(f"{NOTE}/{rank}", f"rank {rank} raised in {where()}: {text}")
            _noted = True
        raise


@contextmanager
def naming(what: str, channel: Any) -> Iterator[None]:
    """Wraps a collective of a Channel.

    Args:
        what: text that says what is exchanged.

    Raises:
        LostRank: the backend raised an error; names the ranks that are to blame, if that can be
            found out.
    """
    try:
        yield
    except RuntimeError as error:
        reasons = ["no rank has said why: see the backend's own error, above"]
        with suppress(Exception):
            ranks = torch.distributed.get_process_group_ranks(channel.group)
            reasons = _blamed(ranks, sum(channel.calls.values())) or reasons
        raise LostRank(f"ds_kfac: {what} could not be exchanged: {'; '.join(reasons)}") from error


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _blamed(ranks: Sequence[int], number: int) -> list[str]:
    store, mine, prefix = (
        _store(),
        torch.distributed.get_rank(),
        f"{WAITING}/{'-'.join(map(str, ranks))}/{number}",
    )
    store.set(f"{prefix}/{mine}", "")
    deadline = time.monotonic() + PATIENCE
    while True:
        notes = [
            store.get(f"{NOTE}/{rank}").decode()
            for rank in ranks
            if store.check([f"{NOTE}/{rank}"])
        ]
        missing = [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]
        if notes or not missing:
            return notes
        if time.monotonic() > deadline:
            who = ", ".join(map(str, missing))
            return [
                f"rank {who} did not come: it died (killed, out of memory), or is in another part "
                f"of the program"
            ]
        time.sleep(0.1)
