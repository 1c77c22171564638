"""What ranks exchange outside of the step: small objects, and whether local work between collectives failed on one of
them, which must be an error on all and not a hang."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed

T = TypeVar("T")

SHOWN = 4
"""Problems of a rank that a message spells out."""


def gathered(mine: T, group: Any = None) -> list[T]:
    """The object of every rank of a group (None: of the job), by rank; pickled. Collective."""
    everyone = [mine] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, mine, group=group)
    return everyone


@contextmanager
def failing_together(headline: str, group: Any, error: type[Exception] = RuntimeError) -> Iterator[list[str]]:
    """Run the block on every rank; it appends problems to the yielded list or raises. Collective.

    Raises:
        error: on every rank, with ``headline`` and every rank's problems, if any rank had one.
    """
    problems: list[str] = []
    try:
        yield problems
    except Exception as problem:  # not swallowed: raised below on every rank
        problems.append(f"{type(problem).__name__}: {problem}")
    found = []
    for rank, texts in enumerate(gathered(problems, group)):
        found += [f"rank {rank}: {text}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            found.append(f"rank {rank}: and {len(texts) - SHOWN} more")
    if found:
        raise error(headline + "\n  " + "\n  ".join(found))
