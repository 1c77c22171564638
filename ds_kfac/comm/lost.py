"""Whose fault it is that a collective failed: what the backends say names neither a rank nor what was exchanged.

By the job's store. A rank that raises in K-FAC's step leaves a note there; one whose collective fails looks for notes,
and says that it waits, so that those that do not are known: they died, or are elsewhere.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed

NOTE, WAITING = "ds_kfac/note", "ds_kfac/waiting"
PATIENCE = 3.0
"""Seconds in which ranks whose collective failed find each other."""


class LostRank(RuntimeError):
    """A collective of K-FAC failed."""


@contextmanager
def telling(where: Callable[[], str]) -> Iterator[None]:
    """Around a step: what this rank raises is told to the others, which wait for it. ``where``: what it was doing."""
    try:
        yield
    except LostRank:
        raise
    except Exception as error:
        with suppress(Exception):  # the job may have lost its store, too
            rank, text = torch.distributed.get_rank(), f"{type(error).__name__}: {error}"
            _store().set(f"{NOTE}/{rank}", f"rank {rank} raised in {where()}: {text}")
        raise


@contextmanager
def naming(what: str, group: Any, number: int) -> Iterator[None]:
    """Around a collective of a group's.

    Args:
        what: is exchanged.
        number: of the collective, the same on every rank of the group, and another one for every collective.

    Raises:
        LostRank: for what the backend raised, with the ranks that are to blame, as far as they are known.
    """
    try:
        yield
    except RuntimeError as error:
        found = ["no rank has said why: see the backend's own error, above"]
        with suppress(Exception):
            found = _blamed(torch.distributed.get_process_group_ranks(group), number) or found
        raise LostRank(f"ds_kfac: {what} could not be exchanged: {'; '.join(found)}") from error


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _blamed(ranks: Sequence[int], number: int) -> list[str]:
    store, mine, prefix = _store(), torch.distributed.get_rank(), f"{WAITING}/{'-'.join(map(str, ranks))}/{number}"
    store.set(f"{prefix}/{mine}", "")
    deadline = time.monotonic() + PATIENCE
    while True:
        notes = [store.get(f"{NOTE}/{rank}").decode() for rank in ranks if store.check([f"{NOTE}/{rank}"])]
        missing = [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]
        if notes or not missing:
            return notes
        if time.monotonic() > deadline:
            who = ", ".join(map(str, missing))
            return [f"rank {who} did not come: it died (killed, out of memory), or is in another part of the program"]
        time.sleep(0.1)
