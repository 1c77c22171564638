"""The batch sums of one step on their way to the eigen workers, in messages of 32 or 16 bits.

A sum travels from each of its contributors to its owner, the rank that averages the factor. Sums that nobody but their
owner makes do not travel. A message carries as much as its bound lets it: a long sum may travel in several pieces. It
is an all-to-all followed by a local sum in rank order: the same result whatever the order of arrival, and sums in fp32
whatever travels. Which sums are in which message is a pure layout, the same on every rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.assignment.spread import Contributors
from ds_kfac.comm.message import Channel, Message, Move, Part, RelayoutPlan
from ds_kfac.model.rows import BatchSum

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
    eigen_workers: Mapping[str, int],
    contributors: Contributors,
    keys: frozenset[str],
    step: int,
) -> tuple[Slot, ...]:
    """Sums of the factors in ``keys`` at ``step``."""
    due = [(factor, eigen_workers[factor.key]) for factor in factors if factor.key in keys]
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
    eigen_workers: Mapping[str, int]
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
        ranks = (self.contributors.of(key, self.eigen_workers[key], step) for key in sorted(keys))
        asked = keys, tuple(ranks)
        if asked not in self._known:
            if len(self._known) == KNOWN:
                self._known.pop(next(iter(self._known)))
            found = slots(self.factors, self.eigen_workers, self.contributors, keys, step)
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


DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
KIND = "factors"


def plans(bucket: Bucket, rank: int, world: int) -> tuple[RelayoutPlan, RelayoutPlan]:
    """What this rank sends and receives of a message: elements of its pieces, and counts."""
    elements, counts = [], []
    for index, piece in enumerate(bucket):
        slot = piece.slot
        if slot.owner == rank:
            pairs = [(source, rank) for source in slot.contributors if source != rank]
        else:
            pairs = [(rank, slot.owner)] if rank in slot.contributors else []
        elements += [Move(index, piece.start, piece.numel, *pair) for pair in pairs]
        counts += [Move(index, 0, 1, *pair) for pair in pairs if piece.start == 0]
    return RelayoutPlan(world, tuple(elements)), RelayoutPlan(world, tuple(counts))


class Reduction:
    """One message, to be waited for later. Collective: start on every rank, in the same order.

    Args:
        sums: factor key -> this rank's, of the slots that it contributes to.
    """

    def __init__(
        self,
        bucket: Bucket,
        sums: Mapping[str, BatchSum],
        channel: Channel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def of(move: Move) -> BatchSum:
            return sums[bucket[move.param].slot.factor]

        self.bucket, self.rank = bucket, channel.rank
        elements, counts = plans(bucket, channel.rank, channel.world)
        parts = (
            Part(KIND, counts, lambda move: of(move).count.reshape(1), torch.float32),
            Part(KIND, elements, lambda move: of(move).sum_P.narrow(0, move.start, move.numel), dtype),
        )
        self._message = Message(parts, channel, device)

    def add_to(self, sums: Mapping[str, BatchSum]) -> None:
        """Wait, and turn this rank's sums of the slots that it owns into those of all contributors, in rank order."""
        counts, elements = self._message.wait()
        arrived: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for kind, arrivals in enumerate((counts, elements)):
            for move, part in arrivals:
                arrived.setdefault((kind, move.param), []).append((move.source, part))
        for (kind, index), parts in arrived.items():
            piece = self.bucket[index]
            own = sums[piece.slot.factor]
            whole = own.sum_P.narrow(0, piece.start, piece.numel) if kind else own.count.reshape(1)
            if self.rank in piece.slot.contributors:
                parts.append((self.rank, whole))
            ordered: list[Any] = [part.float() for _, part in sorted(parts, key=lambda part: part[0])]
            total = ordered[0]
            for part in ordered[1:]:
                total = total + part
            whole.copy_(total)


IN_FLIGHT = 2
"""Messages at a time: each holds what it sends and what it receives."""


class Reducer:
    """Sums of the factors that are due, of which this rank makes those that it contributes to.

    The order of the messages is the same on every rank, and so is their number. Transient memory: this rank's sums and
    those of the factors it decomposes, and :data:`IN_FLIGHT` messages, each at most twice ``nbytes``.

    Args:
        factors: what there is.
        eigen_workers: factor key -> rank.
        contributors: which ranks make a factor's sums; None: all.
        dtype: on the wire.
        nbytes: most that a rank sends, or receives, in one message.

    Attributes:
        layout: what travels in which message, at any step.
    """

    def __init__(
        self,
        factors: Sequence[FactorSpec],
        eigen_workers: Mapping[str, int],
        channel: Channel,
        device: torch.device,
        *,
        contributors: Contributors | None = None,
        dtype: torch.dtype = torch.float32,
        nbytes: int = 2**28,
    ) -> None:
        self.contributors = contributors or Contributors(channel.world)
        self.channel, self.device, self.dtype = channel, device, dtype
        self.layout = Layout(tuple(factors), eigen_workers, self.contributors, dtype.itemsize, nbytes)

    def empty(self, keys: frozenset[str], step: int) -> dict[str, BatchSum]:
        """Factor key -> sum without rows, of those in ``keys`` that this rank contributes to."""
        rank, found = self.channel.rank, self.layout.slots(keys, step)
        return {slot.factor: BatchSum(slot.numel, self.device) for slot in found if rank in slot.contributors}

    def reduce(self, sums: Mapping[str, BatchSum], keys: frozenset[str], step: int) -> dict[str, BatchSum]:
        """Sums over all contributors of the factors in ``keys`` that this rank averages. Collective; a rank without
        rows sends zeros.

        Args:
            sums: what :meth:`empty` gave, with this rank's rows; not to be used any more.
        """
        found, rank = self.layout.slots(keys, step), self.channel.rank
        own = {slot.factor: BatchSum(slot.numel, self.device) for slot in found if slot.owner == rank} | {**sums}
        running: list[Reduction] = []
        for bucket in self.layout.buckets(keys, step):
            if len(running) == IN_FLIGHT:
                running.pop(0).add_to(own)
            running.append(Reduction(bucket, own, self.channel, self.device, self.dtype))
            for piece in bucket:
                slot = piece.slot
                if slot.owner != rank and slot.factor in own and piece.start + piece.numel == slot.numel:
                    own.pop(slot.factor).clear()  # all of it is in messages
        for reduction in running:
            reduction.add_to(own)
        return own
