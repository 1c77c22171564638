"""Local work between collectives, whose failure on one rank must be an error on all and not a hang."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed

SHOWN = 4
"""Problems of a rank that a message spells out."""


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
    everyone: list[list[str]] = [problems] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, problems, group=group)
    found = []
    for rank, texts in enumerate(everyone):
        found += [f"rank {rank}: {text}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            found.append(f"rank {rank}: and {len(texts) - SHOWN} more")
    if found:
        raise error(headline + "\n  " + "\n  ".join(found))
