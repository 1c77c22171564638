"""Which batch sums travel in which message. Pure layout, the same on every rank, no communication.

A sum travels from each of its contributors to its owner, the rank that averages the factor. Sums that nobody but their
owner makes do not travel. A message carries as much as its bound lets it: a long sum may travel in several pieces.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds_kfac.assignment.spread import Contributors
from ds_kfac.assignment.work import FactorSpec

ALIGNMENT = 32
"""Elements; a piece of a sum starts at a multiple, so that vectorised kernels may assume it."""
COUNT = 4
"""Bytes of a sum's count."""
PIECES = 4
"""A piece takes at most such a part of its message."""
KNOWN = 64
"""Steps whose layout is kept: contributors come round again after as many updates as a node has ranks."""


@dataclass(frozen=True)
class Slot:
    """The batch sum of a factor.

    Attributes:
        factor: its key.
        numel: of the packed sum.
        owner: the rank that averages it.
        contributors: ranks that make it, ascending.
    """

    factor: str
    numel: int
    owner: int
    contributors: Sequence[int]

    @property
    def sources(self) -> int:
        """How many ranks send it."""
        return len(self.contributors) - (self.owner in self.contributors)

    @property
    def travels(self) -> bool:
        return self.sources > 0


@dataclass(frozen=True)
class Piece:
    """Elements ``start .. start + numel`` of a sum; the first one carries its count."""

    slot: Slot
    start: int
    numel: int


Bucket = tuple[Piece, ...]
"""What travels in one message."""


def slots(
    factors: Sequence[FactorSpec],
    decomposers: Mapping[str, int],
    contributors: Contributors,
    keys: frozenset[str],
    step: int,
) -> tuple[Slot, ...]:
    """Sums of the factors in ``keys`` at ``step``."""
    due = [(factor, decomposers[factor.key]) for factor in factors if factor.key in keys]
    return tuple(
        Slot(factor.key, factor.side.numel, owner, contributors.of(factor.key, owner, step)) for factor, owner in due
    )


def buckets(found: Sequence[Slot], *, world: int, itemsize: int, nbytes: int) -> tuple[Bucket, ...]:
    """The messages of some sums, in the order in which they leave.

    Args:
        itemsize: of an element on the wire.
        nbytes: bound on what a rank sends, or receives, in one message.
    """
    made: list[Bucket] = []
    pieces: list[Piece] = []
    load = np.zeros((2, world))  # sent, received
    for slot in (slot for slot in found if slot.travels):
        for piece in _pieces(slot, itemsize, nbytes):
            senders = [rank for rank in slot.contributors if rank != slot.owner]
            more, received = piece.numel * itemsize, piece.numel * itemsize * slot.sources
            full = max(load[0, senders].max() + more, load[1, slot.owner] + received) > nbytes
            if pieces and full:
                made.append(tuple(pieces))
                pieces, load = [], np.zeros((2, world))
            load[0, senders] += more
            load[1, slot.owner] += received
            pieces.append(piece)
    return (*made, tuple(pieces)) if pieces else ()


def _pieces(slot: Slot, itemsize: int, nbytes: int) -> list[Piece]:
    most = max(ALIGNMENT, nbytes // (PIECES * itemsize * max(1, slot.sources)) // ALIGNMENT * ALIGNMENT)
    return [Piece(slot, start, min(most, slot.numel - start)) for start in range(0, max(slot.numel, 1), most)]


@dataclass(frozen=True)
class Layout:
    """Sums and messages of a run's steps, the same on every rank: what :func:`slots` and :func:`buckets` are asked."""

    factors: Sequence[FactorSpec]
    decomposers: Mapping[str, int]
    contributors: Contributors
    itemsize: int
    nbytes: int
    _known: dict[tuple, tuple[tuple[Slot, ...], tuple[Bucket, ...]]] = field(default_factory=dict, compare=False)

    def slots(self, keys: frozenset[str], step: int) -> tuple[Slot, ...]:
        """The sums of some factors at a step."""
        return self._of(keys, step)[0]

    def buckets(self, keys: frozenset[str], step: int) -> tuple[Bucket, ...]:
        """Their messages, in the order in which they leave."""
        return self._of(keys, step)[1]

    def _of(self, keys: frozenset[str], step: int) -> tuple[tuple[Slot, ...], tuple[Bucket, ...]]:
        """Made once for as long as the same factors come from the same ranks."""
        ranks = (self.contributors.of(key, self.decomposers[key], step) for key in sorted(keys))
        asked = keys, tuple(ranks)
        if asked not in self._known:
            if len(self._known) == KNOWN:
                self._known.pop(next(iter(self._known)))
            found = slots(self.factors, self.decomposers, self.contributors, keys, step)
            world = self.contributors.world
            made = buckets(found, world=world, itemsize=self.itemsize, nbytes=self.nbytes)
            self._known[asked] = found, made
        return self._known[asked]


def payload(bucket: Bucket, itemsize: int) -> Mapping[tuple[int, int], int]:
    """(source, target) -> bytes of a message without padding; counts are in fp32."""
    counts, elements = payloads(bucket, itemsize)
    return {pair: counts[pair] + elements[pair] for pair in elements}


def payloads(bucket: Bucket, itemsize: int) -> tuple[Mapping[tuple[int, int], int], Mapping[tuple[int, int], int]]:
    """The same of its counts, and of its elements, which lie apart."""
    counts: Counter[tuple[int, int]] = Counter()
    elements: Counter[tuple[int, int]] = Counter()
    for piece in bucket:
        for rank in piece.slot.contributors:
            if rank != piece.slot.owner:
                elements[rank, piece.slot.owner] += piece.numel * itemsize
                counts[rank, piece.slot.owner] += COUNT if piece.start == 0 else 0
    return counts, elements
