"""Find the ranks that made a collective fail. The errors of the communication backends name neither
a rank nor what was exchanged.

Ranks communicate through the job's store. A rank that raises in K-FAC's step leaves a note there. A
rank whose collective fails registers as waiting and reads the notes. Ranks that do not register
have died, or are running another part of the program.

A rank reads the notes only after its own collective has failed. As long as the process that raised
is alive, the other ranks wait for their backend's timeout, as they do in plain DeepSpeed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed

NOTE, WAITING = "ds_kfac/note", "ds_kfac/waiting"
WAIT_SECONDS = 3.0
"""Seconds that a rank whose collective has failed waits for other ranks to register."""


_noted = False  # whether this rank's note is in the store


class LostRank(RuntimeError):
    """Error for a collective of K-FAC that failed."""


@contextmanager
def telling(where: Callable[[], str]) -> Iterator[None]:
    """Run a step inside the ``with`` block. If the step raises, leave a note for the ranks that
    wait for this rank. The note is deleted after the next step that does not raise.

    Args:
        where: returns a text that says what this rank was doing.
    """
    global _noted
    try:
        yield
        if _noted:
            with suppress(Exception):
                _noted = not _store().delete_key(f"{NOTE}/{torch.distributed.get_rank()}")
    except LostRank:
        raise
    except Exception as error:
        with suppress(Exception):  # the job's store may be lost, too
            rank = torch.distributed.get_rank()
            text = f"{type(error).__name__}: {error}"
            _store().set(f"{NOTE}/{rank}", f"rank {rank} raised in {where()}: {text}")
            _noted = True
        raise


@contextmanager
def naming(what: str, channel: Any) -> Iterator[None]:
    """Run a collective of a :class:`Channel`, or the wait for its end, inside the ``with`` block.

    The channel must already have counted the collective. Then ranks that fail at different places
    in the same collective still register under the same number.

    Args:
        what: name of the data that is exchanged, for the error's text.

    Raises:
        LostRank: the backend raised an error. The text names the ranks that caused the error, if
            they can be found.
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
    """Register this rank as waiting, and return reasons why the collective failed. The list is
    empty if all ranks register and none has left a note.

    Args:
        ranks: members of the process group.
        number: number of the collective. It is the same on all ranks that have entered it.
    """
    store = _store()
    prefix = f"{WAITING}/{'-'.join(map(str, ranks))}/{number}"
    store.set(f"{prefix}/{torch.distributed.get_rank()}", "")
    deadline = time.monotonic() + WAIT_SECONDS
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
                f"rank {who} did not come to this exchange: it died (killed, out of memory), or is "
                "running another part of the program"
            ]
        time.sleep(0.1)
