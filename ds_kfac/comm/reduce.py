"""Reduces a step's batch sums to the factors' owners, in messages of 32 or 16 bits.

A sum travels from each of its contributors to its owner, the rank that averages the factor. A
message has a bound in bytes: a long sum may travel in several pieces. Each message is an
all-to-all, followed by a local fp32 sum in rank order, so the result does not depend on the order
of arrival. Which message has which sums is a pure layout.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import Channel, Message, MessagePart, Move, RelayoutPlan
from ds_kfac.model.rows import TERMS, BatchSum

ALIGNMENT = 32
"""A piece of a sum starts at a multiple of this many elements, for vectorised kernels."""
COUNTS = TERMS + 1
"""Numbers that travel with a sum, in fp32."""
PIECES = 4
"""A piece takes at most 1/PIECES of its message."""
CACHED = 64
"""Cached messages of steps, and their plans: contributors repeat after as many updates as a node
has ranks."""
IN_FLIGHT = 2
"""Messages at a time; each holds what it sends and what it receives."""
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Slot:
    """The batch sum of a factor.

    Attributes:
        factor: key of the factor.
        numel: elements of the packed sum.
        owner: rank that averages it.
        contributors: ranks that have rows of it, ascending.
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
    """Elements ``start .. start + numel`` of a sum; the first one carries its counts."""

    slot: Slot
    start: int
    numel: int


Bucket = tuple[SumPiece, ...]
"""Pieces that travel in one message."""


@lru_cache(maxsize=CACHED)
def buckets(
    slots: tuple[Slot, ...], *, world: int, itemsize: int, nbytes: int
) -> tuple[Bucket, ...]:
    """The messages of some sums, in the order in which they leave.

    Args:
        itemsize: bytes of an element on the wire.
        nbytes: most bytes that a rank sends, or receives, in one message.
    """
    made: list[Bucket] = []
    pieces: list[SumPiece] = []
    load = np.zeros((2, world))  # sent, received
    for slot in slots:
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
    """The sums and messages of each step, the same on every rank.

    Attributes:
        eigen_workers: factor key -> rank that averages and decomposes it.
        dtype: dtype of sums on the wire.
        nbytes: see :func:`buckets`.
    """

    factors: Sequence[FactorSpec]
    eigen_workers: Mapping[str, int]
    contributors: Contributors
    dtype: torch.dtype
    nbytes: int

    def of(self, keys: frozenset[str], step: int) -> tuple[tuple[Slot, ...], tuple[Bucket, ...]]:
        """The sums of some factors at a step, and their messages in order."""
        owners = [
            (factor, self.eigen_workers[factor.key])
            for factor in self.factors
            if factor.key in keys
        ]
        slots = tuple(
            Slot(
                factor.key, factor.side.numel, owner, self.contributors.of(factor.key, owner, step)
            )
            for factor, owner in owners
        )
        return slots, buckets(
            slots, world=self.contributors.world, itemsize=self.dtype.itemsize, nbytes=self.nbytes
        )


def payloads(
    bucket: Bucket, itemsize: int
) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """(source, target) -> bytes of a message's counts, in fp32, and of its elements, without
    padding."""
    counts, elements = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for piece in bucket:
        for rank in piece.slot.senders:
            elements[rank, piece.slot.owner] += piece.numel * itemsize
            counts[rank, piece.slot.owner] += 4 * COUNTS if piece.start == 0 else 0
    return counts, elements


@lru_cache(maxsize=CACHED)
def plans(bucket: Bucket, rank: int, world: int) -> tuple[RelayoutPlan, RelayoutPlan]:
    """This rank's moves of a message: of counts, and of the pieces' elements."""
    counts, elements = [], []
    for index, piece in enumerate(bucket):
        pairs = [
            (sender, piece.slot.owner)
            for sender in piece.slot.senders
            if rank in (sender, piece.slot.owner)
        ]
        elements += [Move(index, piece.start, piece.numel, *pair) for pair in pairs]
        counts += [Move(index, 0, COUNTS, *pair) for pair in pairs if piece.start == 0]
    return RelayoutPlan(world, tuple(counts)), RelayoutPlan(world, tuple(elements))


class Reducer:
    """Reduces the batch sums of the factors that are due.

    The messages are the same on every rank, in number and order. Transient memory: this rank's
    sums, those of the factors that it averages, and :data:`IN_FLIGHT` messages, each at most twice
    the layout's ``nbytes``."""

    def __init__(self, layout: Layout, channel: Channel, device: torch.device) -> None:
        self.layout, self.channel, self.device = layout, channel, device
        self._slots, self._buckets = layout.of(frozenset(), 0)

    def begin(self, keys: frozenset[str], step: int) -> Mapping[str, int]:
        """Prepare for the factors in ``keys`` at ``step``. Returns those that this rank contributes
        to, each with its stride: every so many rows one counts."""
        self._slots, self._buckets = self.layout.of(keys, step)
        strides, own = (
            self.layout.contributors.strides,
            [s for s in self._slots if self.channel.rank in s.contributors],
        )
        return {slot.factor: strides.get(slot.factor, 1) for slot in own}

    def reduce(self, sums: dict[str, BatchSum]) -> dict[str, BatchSum]:
        """Sums over all contributors, for the factors that this rank averages. Collective.
        ``sums``: this rank's, by factor key, which are overwritten and freed; for a missing factor
        zeros travel."""
        rank, running = self.channel.rank, list[tuple[Bucket, Message]]()
        for bucket in self._buckets:
            if len(running) == IN_FLIGHT:
                self.add(*running.pop(0), sums)
            for slot in (piece.slot for piece in bucket):
                if slot.factor not in sums and rank in (slot.owner, *slot.contributors):
                    sums[slot.factor] = BatchSum.empty(slot.numel, self.device)
            running.append((bucket, self.send(bucket, sums)))
            for piece in bucket:
                if piece.slot.owner != rank and piece.start + piece.numel == piece.slot.numel:
                    sums.pop(piece.slot.factor, None)  # all its pieces are in messages
        for bucket, message in running:
            self.add(bucket, message, sums)
        for slot in self._slots:
            if slot.owner == rank:
                if slot.factor not in sums:
                    sums[slot.factor] = BatchSum.empty(slot.numel, self.device)
                sums[slot.factor].ranks = len(slot.contributors)
        return sums

    def send(self, bucket: Bucket, sums: Mapping[str, BatchSum]) -> Message:
        """Collective. ``sums``: this rank's, for the slots that it contributes to or owns."""

        def count_of(move: Move) -> Tensor:
            return sums[bucket[move.param].slot.factor].counts

        def elements_of(move: Move) -> Tensor:
            return sums[bucket[move.param].slot.factor].sum_P.narrow(0, move.start, move.numel)

        counts, elements = plans(bucket, self.channel.rank, self.channel.world)
        parts = (
            MessagePart("factors", counts, count_of, torch.float32),
            MessagePart("factors", elements, elements_of, self.layout.dtype),
        )
        return Message(parts, self.channel, self.device)

    def add(self, bucket: Bucket, message: Message, sums: Mapping[str, BatchSum]) -> None:
        """Wait; then this rank's sums of the slots that it owns become those of all contributors,
        in rank order."""
        # (count or elements, piece) -> rank -> its part
        arrived: dict[tuple[int, int], dict[int, Tensor]] = {}
        for kind, arrivals in enumerate(message.wait()):
            for move, part in arrivals:
                arrived.setdefault((kind, move.param), {})[move.source] = part
        for (kind, index), parts in arrived.items():
            piece = bucket[index]
            batch = sums[piece.slot.factor]
            whole = batch.sum_P.narrow(0, piece.start, piece.numel) if kind else batch.counts
            # rounded as others', or the sum would depend on the owner
            if self.channel.rank in piece.slot.contributors:
                parts[self.channel.rank] = whole.to(self.layout.dtype) if kind else whole
            total, *others = (parts[rank].float() for rank in sorted(parts))
            for part in others:
                total = total + part
            whole.copy_(total)
