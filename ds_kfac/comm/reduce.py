"""The batch sums of one step on their way to the factors' owners, in messages of 32 or 16 bits.

A sum travels from each of its contributors to its owner, the rank that averages the factor. Sums that nobody but their
owner makes do not travel. A message carries as much as its bound lets it: a long sum may travel in several pieces. It
is an all-to-all followed by a local sum in rank order: the same result whatever the order of arrival, and sums in fp32
whatever travels. Which sums are in which message is a pure layout, the same on every rank.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import Channel, Message, MessagePart, Move, RelayoutPlan
from ds_kfac.model.rows import BatchSum

ALIGNMENT = 32
"""Elements; a piece of a sum starts at a multiple, so that vectorised kernels may assume it."""
COUNT = 4
"""Bytes of a sum's count."""
PIECES = 4
"""A piece takes at most such a part of its message."""
KNOWN = 64
"""Steps whose layout is kept, and messages whose plans are: contributors come round again after as many updates as a
node has ranks."""
IN_FLIGHT = 2
"""Messages at a time: each holds what it sends and what it receives."""
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    def senders(self) -> list[int]:
        """Contributors from which it travels."""
        return [rank for rank in self.contributors if rank != self.owner]


@dataclass(frozen=True)
class SumPiece:
    """Elements ``start .. start + numel`` of a sum; the first one carries its count."""

    slot: Slot
    start: int
    numel: int


Bucket = tuple[SumPiece, ...]
"""What travels in one message."""


def buckets(found: Sequence[Slot], *, world: int, itemsize: int, nbytes: int) -> tuple[Bucket, ...]:
    """The messages of some sums, in the order in which they leave.

    Args:
        itemsize: of an element on the wire.
        nbytes: bound on what a rank sends, or receives, in one message.
    """
    made: list[Bucket] = []
    pieces: list[SumPiece] = []
    load = np.zeros((2, world))  # sent, received
    for slot in found:
        if not (senders := slot.senders):
            continue
        most = max(ALIGNMENT, nbytes // (PIECES * itemsize * len(senders)) // ALIGNMENT * ALIGNMENT)
        for start in range(0, max(slot.numel, 1), most):
            piece = SumPiece(slot, start, min(most, slot.numel - start))
            more, received = piece.numel * itemsize, piece.numel * itemsize * len(senders)
            full = max(load[0, senders].max() + more, load[1, slot.owner] + received) > nbytes
            if pieces and full:
                made.append(tuple(pieces))
                pieces, load = [], np.zeros((2, world))
            load[0, senders] += more
            load[1, slot.owner] += received
            pieces.append(piece)
    return (*made, tuple(pieces)) if pieces else ()


@dataclass(frozen=True)
class Layout:
    """Sums and messages of a run's steps, the same on every rank.

    Attributes:
        eigen_workers: factor key -> rank that averages and decomposes it.
        dtype: on the wire.
        nbytes: see :func:`buckets`.
    """

    factors: Sequence[FactorSpec]
    eigen_workers: Mapping[str, int]
    contributors: Contributors
    dtype: torch.dtype
    nbytes: int
    _known: dict[tuple, tuple[tuple[Slot, ...], tuple[Bucket, ...]]] = field(default_factory=dict, compare=False)

    def of(self, keys: frozenset[str], step: int) -> tuple[tuple[Slot, ...], tuple[Bucket, ...]]:
        """The sums of some factors at a step, and their messages in the order in which they leave: made once for as
        long as the same factors come from the same ranks."""
        owners = {factor.key: self.eigen_workers[factor.key] for factor in self.factors if factor.key in keys}
        ranks = {key: self.contributors.of(key, owner, step) for key, owner in owners.items()}
        context = tuple(ranks.items())
        if context not in self._known:
            if len(self._known) == KNOWN:
                self._known.pop(next(iter(self._known)))
            sizes = {factor.key: factor.side.numel for factor in self.factors}
            sums = tuple(Slot(key, sizes[key], owner, ranks[key]) for key, owner in owners.items())
            world, itemsize = self.contributors.world, self.dtype.itemsize
            self._known[context] = sums, buckets(sums, world=world, itemsize=itemsize, nbytes=self.nbytes)
        return self._known[context]


def payloads(bucket: Bucket, itemsize: int) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """(source, target) -> bytes of a message without padding: of its counts, in fp32, and of its elements, which lie
    apart."""
    counts, elements = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for piece in bucket:
        for rank in piece.slot.senders:
            elements[rank, piece.slot.owner] += piece.numel * itemsize
            counts[rank, piece.slot.owner] += COUNT if piece.start == 0 else 0
    return counts, elements


def payload(bucket: Bucket, itemsize: int) -> Mapping[tuple[int, int], int]:
    """The same of both together."""
    counts, elements = payloads(bucket, itemsize)
    return counts + elements


@lru_cache(maxsize=KNOWN)
def plans(bucket: Bucket, rank: int, world: int) -> tuple[RelayoutPlan, RelayoutPlan]:
    """What this rank sends and receives of a message: counts, and elements of its pieces."""
    counts, elements = [], []
    for index, piece in enumerate(bucket):
        pairs = [(sender, piece.slot.owner) for sender in piece.slot.senders if rank in (sender, piece.slot.owner)]
        elements += [Move(index, piece.start, piece.numel, *pair) for pair in pairs]
        counts += [Move(index, 0, 1, *pair) for pair in pairs if piece.start == 0]
    return RelayoutPlan(world, tuple(counts)), RelayoutPlan(world, tuple(elements))


class Reduction:
    """One message, to be waited for later. Collective: start on every rank, in the same order. ``sums``: factor key ->
    this rank's, of the slots that it contributes to or owns."""

    def __init__(
        self, bucket: Bucket, sums: Mapping[str, BatchSum], channel: Channel, device: torch.device, dtype: torch.dtype
    ) -> None:
        def of(move: Move) -> BatchSum:
            return sums[bucket[move.param].slot.factor]

        self.bucket, self.rank, self.dtype = bucket, channel.rank, dtype
        counts, elements = plans(bucket, channel.rank, channel.world)
        parts = (
            MessagePart("factors", counts, lambda move: of(move).count.reshape(1), torch.float32),
            MessagePart("factors", elements, lambda move: of(move).sum_P.narrow(0, move.start, move.numel), dtype),
        )
        self._message = Message(parts, channel, device)

    def add_to(self, sums: Mapping[str, BatchSum]) -> None:
        """Wait, and turn this rank's sums of the slots that it owns into those of all contributors, in rank order."""
        arrived: dict[tuple[int, int], dict[int, Tensor]] = {}  # (count or elements, piece) -> rank -> its part
        for kind, arrivals in enumerate(self._message.wait()):
            for move, part in arrivals:
                arrived.setdefault((kind, move.param), {})[move.source] = part
        for (kind, index), parts in arrived.items():
            piece = self.bucket[index]
            own = sums[piece.slot.factor]
            whole = own.sum_P.narrow(0, piece.start, piece.numel) if kind else own.count.reshape(1)
            if self.rank in piece.slot.contributors:  # rounded as theirs, else the sum would depend on who owns it
                parts[self.rank] = whole.to(self.dtype) if kind else whole
            first, *others = (parts[rank].float() for rank in sorted(parts))
            for part in others:
                first = first + part
            whole.copy_(first)


class Reducer:
    """Sums of the factors that are due, of which this rank makes those that it contributes to.

    The order of the messages is the same on every rank, and so is their number. Transient memory: this rank's sums and
    those of the factors it decomposes, and :data:`IN_FLIGHT` messages, each at most twice the layout's ``nbytes``."""

    def __init__(self, layout: Layout, channel: Channel, device: torch.device) -> None:
        self.layout, self.channel, self.device = layout, channel, device
        self._slots, self._buckets = layout.of(frozenset(), 0)

    def begin(self, keys: frozenset[str], step: int) -> Collection[str]:
        """The next sums are of the factors in ``keys`` at ``step``. Returns those that this rank contributes to -> of
        how many of its rows one counts."""
        self._slots, self._buckets = self.layout.of(keys, step)
        strides, own = self.layout.contributors.strides, [s for s in self._slots if self.channel.rank in s.contributors]
        return {slot.factor: strides.get(slot.factor, 1) for slot in own}

    def reduce(self, sums: dict[str, BatchSum]) -> dict[str, BatchSum]:
        """Sums over all contributors of the factors that this rank averages. Collective. ``sums``: this rank's, by
        factor key, taken over; for a factor that is missing zeros travel."""
        rank, running = self.channel.rank, list[Reduction]()
        for bucket in self._buckets:
            if len(running) == IN_FLIGHT:
                running.pop(0).add_to(sums)
            for slot in (piece.slot for piece in bucket):
                if slot.factor not in sums and rank in (slot.owner, *slot.contributors):
                    sums[slot.factor] = BatchSum.empty(slot.numel, self.device)
            running.append(Reduction(bucket, sums, self.channel, self.device, self.layout.dtype))
            for piece in bucket:
                if piece.slot.owner != rank and piece.start + piece.numel == piece.slot.numel:
                    sums.pop(piece.slot.factor, None)  # all of it is in messages
        for reduction in running:
            reduction.add_to(sums)
        for slot in self._slots:
            if slot.owner == rank:
                if slot.factor not in sums:
                    sums[slot.factor] = BatchSum.empty(slot.numel, self.device)
                sums[slot.factor].ranks = len(slot.contributors)
        return sums
