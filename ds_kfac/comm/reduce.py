"""Reduce a step's batch sums to the owners of the factors. Sums are sent in fp32 or bf16.

The owner of a factor is the rank that averages it. Each contributor sends its sum to the owner.
Messages have a maximal size, so a long sum may be sent in several pieces. Each message is an
all-to-all. The owner then adds up the received sums in fp32 and in rank order, so the result does
not depend on the order of arrival. A :class:`ReductionPlan` defines which message contains which
sums.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import Arrivals, Channel, Message, MessagePart, Move, RelayoutPlan
from ds_kfac.model.rows import TERMS, BatchSum

ALIGNMENT = 32
"""Each piece of a sum starts at a multiple of this many elements, so that kernels can be
vectorised."""
COUNTS = TERMS + 1
"""Number of fp32 counts that are sent with each sum, see :class:`BatchSum`."""
PIECES = 4
"""A piece of a sum takes at most 1/PIECES of the maximal size of a message."""
CACHED = 64
"""Maximal number of entries in each of the two caches, those of :func:`buckets` and :func:`plans`.
Entries are reused often, because the number of different choices of contributors is only about the
number of ranks on a node."""
IN_FLIGHT = 2
"""Number of messages in flight at a time. Each has a send buffer and a receive buffer."""
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Value in the config -> dtype of sums on the wire."""


@dataclass(frozen=True)
class Slot:
    """Description of the batch sum of one factor in one step.

    Attributes:
        factor: key of the factor.
        numel: number of elements of the packed sum.
        owner: rank that averages the factor.
        contributors: ranks that capture rows of the factor in this step, in ascending order.
    """

    factor: str
    numel: int
    owner: int
    contributors: Sequence[int]

    @property
    def senders(self) -> list[int]:
        """The contributors that send their sum to the owner: all contributors except the owner."""
        return [rank for rank in self.contributors if rank != self.owner]


@dataclass(frozen=True)
class SumPiece:
    """Elements ``start`` to ``start + numel - 1`` of a sum. A sum's counts are sent with its first
    piece."""

    slot: Slot
    start: int
    numel: int


Bucket = tuple[SumPiece, ...]
"""The pieces that are sent in one message."""


@lru_cache(maxsize=CACHED)
def buckets(
    slots: tuple[Slot, ...], *, world: int, itemsize: int, nbytes: int
) -> tuple[Bucket, ...]:
    """Divide sums into pieces and the pieces into buckets. Return the buckets in the order in which
    they are sent.

    Args:
        itemsize: number of bytes of an element on the wire.
        nbytes: limit on the bytes that a rank sends in one message, and on those that it receives.
    """
    made: list[Bucket] = []
    pieces: list[SumPiece] = []
    load = np.zeros((2, world))  # bytes that each rank sends, and bytes that it receives
    for slot in slots:
        senders = slot.senders
        if not senders:
            continue
        most = max(ALIGNMENT, nbytes // (PIECES * itemsize * len(senders)) // ALIGNMENT * ALIGNMENT)
        for start in range(0, max(slot.numel, 1), most):
            piece = SumPiece(slot, start, min(most, slot.numel - start))
            sent = piece.numel * itemsize
            received = sent * len(senders)
            full = max(load[0, senders].max() + sent, load[1, slot.owner] + received) > nbytes
            if pieces and full:
                made.append(tuple(pieces))
                pieces = []
                load = np.zeros((2, world))
            load[0, senders] += sent
            load[1, slot.owner] += received
            pieces.append(piece)
    return (*made, tuple(pieces)) if pieces else ()


@dataclass(frozen=True)
class ReductionPlan:
    """Defines which sums are sent in a step, and in which messages. The plan is the same on every
    rank.

    Attributes:
        owners: factor key -> rank that averages and decomposes the factor.
        contributors: which ranks contribute to a factor at a step.
        dtype: dtype of sums on the wire.
        nbytes: see :func:`buckets`.
    """

    factors: Sequence[FactorSpec]
    owners: Mapping[str, int]
    contributors: Contributors
    dtype: torch.dtype
    nbytes: int

    def of(self, keys: frozenset[str], step: int) -> tuple[tuple[Slot, ...], tuple[Bucket, ...]]:
        """Return a slot for each of these factors at a step, and the buckets of their sums."""
        slots = []
        for factor in self.factors:
            if factor.key in keys:
                owner = self.owners[factor.key]
                contributors = self.contributors.of(factor.key, owner, step)
                slots.append(Slot(factor.key, factor.side.numel, owner, contributors))
        return tuple(slots), buckets(
            tuple(slots),
            world=self.contributors.world,
            itemsize=self.dtype.itemsize,
            nbytes=self.nbytes,
        )


def payloads(
    bucket: Bucket, itemsize: int
) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """Return two counters of the bytes in a bucket's message: one for the fp32 counts, and one for
    the elements of the sums. Their keys are (source, target) pairs. Padding is not included."""
    counts = Counter[tuple[int, int]]()
    elements = Counter[tuple[int, int]]()
    for piece in bucket:
        for rank in piece.slot.senders:
            elements[rank, piece.slot.owner] += piece.numel * itemsize
            counts[rank, piece.slot.owner] += 4 * COUNTS if piece.start == 0 else 0
    return counts, elements


@lru_cache(maxsize=CACHED)
def plans(bucket: Bucket, rank: int, world: int) -> tuple[RelayoutPlan, RelayoutPlan]:
    """Return two plans for the message of a bucket: one for the counts, and one for the elements.
    They have only the moves that start or end at ``rank``. ``Move.param`` is the index of a piece
    in the bucket."""
    counts = []
    elements = []
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

    All ranks send the same number of messages in the same order. A reduction needs memory for this
    rank's sums, for the sums of the factors that this rank averages, and for :data:`IN_FLIGHT`
    messages, each of which takes at most twice the plan's ``nbytes``.
    """

    def __init__(self, plan: ReductionPlan, channel: Channel, device: torch.device) -> None:
        self.plan = plan
        self.channel = channel
        self.device = device
        self._slots, self._buckets = plan.of(frozenset(), 0)

    def begin(self, keys: frozenset[str], step: int) -> Mapping[str, int]:
        """Prepare to reduce the factors in ``keys`` at ``step``. Return a dict from factor key to
        stride, for the factors that this rank contributes to. With a stride of k, only every k-th
        row counts."""
        self._slots, self._buckets = self.plan.of(keys, step)
        strides = self.plan.contributors.strides
        return {
            slot.factor: strides.get(slot.factor, 1)
            for slot in self._slots
            if self.channel.rank in slot.contributors
        }

    def reduce(self, sums: dict[str, BatchSum]) -> dict[str, BatchSum]:
        """Return the sums over all contributors for the factors that this rank averages, in a dict
        by factor key. Collective.

        Args:
            sums: factor key -> this rank's sum. The sums are overwritten and freed. If the sum of a
                factor that this rank contributes to is missing, zeros are sent.
        """
        rank = self.channel.rank
        running: list[tuple[Bucket, Message]] = []
        for bucket in self._buckets:
            if len(running) == IN_FLIGHT:
                self.add(*running.pop(0), sums)
            for slot in (piece.slot for piece in bucket):
                if slot.factor not in sums and rank in (slot.owner, *slot.contributors):
                    sums[slot.factor] = BatchSum.empty(slot.numel, self.device)
            running.append((bucket, self.send(bucket, sums)))
            for piece in bucket:
                if piece.slot.owner != rank and piece.start + piece.numel == piece.slot.numel:
                    sums.pop(piece.slot.factor, None)  # all its pieces are in messages now
        for bucket, message in running:
            self.add(bucket, message, sums)
        for slot in self._slots:
            if slot.owner == rank:
                if slot.factor not in sums:
                    sums[slot.factor] = BatchSum.empty(slot.numel, self.device)
                sums[slot.factor].ranks = len(slot.contributors)
        return sums

    def send(self, bucket: Bucket, sums: Mapping[str, BatchSum]) -> Message:
        """Send the pieces of a bucket. Collective.

        Args:
            sums: factor key -> this rank's sum, for the factors that this rank contributes to or
                owns.
        """

        def counts_of(move: Move) -> Tensor:
            return _counts(sums, bucket[move.param])

        def elements_of(move: Move) -> Tensor:
            return _elements(sums, bucket[move.param])

        counts, elements = plans(bucket, self.channel.rank, self.channel.world)
        parts = (
            MessagePart("factors", counts, counts_of, torch.float32),
            MessagePart("factors", elements, elements_of, self.plan.dtype),
        )
        return Message(parts, self.channel, self.device)

    def add(self, bucket: Bucket, message: Message, sums: Mapping[str, BatchSum]) -> None:
        """Wait for a bucket's message. For each piece whose factor this rank owns, replace this
        rank's values in ``sums`` by the sum over all contributors."""
        counts, elements = message.wait()
        self._add(bucket, counts, partial(_counts, sums), torch.float32)
        self._add(bucket, elements, partial(_elements, sums), self.plan.dtype)

    def _add(
        self,
        bucket: Bucket,
        arrivals: Arrivals,
        own: Callable[[SumPiece], Tensor],
        wire: torch.dtype,
    ) -> None:
        """Add up the values of all contributors for each piece that has arrived, in rank order.

        Args:
            own: returns this rank's values of a piece, which are overwritten with the sum.
            wire: dtype in which the values were sent.
        """
        arrived: dict[int, dict[int, Tensor]] = {}  # index of a piece -> rank -> its values
        for move, values in arrivals:
            arrived.setdefault(move.param, {})[move.source] = values
        for place, by_rank in arrived.items():
            piece = bucket[place]
            own_values = own(piece)
            if self.channel.rank in piece.slot.contributors:
                # This rank's values are rounded like those of other ranks. Otherwise the sum would
                # depend on which rank owns the factor.
                by_rank[self.channel.rank] = own_values.to(wire)
            total, *others = (by_rank[rank].float() for rank in sorted(by_rank))
            for values in others:
                total = total + values
            own_values.copy_(total)


def _counts(sums: Mapping[str, BatchSum], piece: SumPiece) -> Tensor:
    return sums[piece.slot.factor].counts


def _elements(sums: Mapping[str, BatchSum], piece: SumPiece) -> Tensor:
    return sums[piece.slot.factor].sum_P.narrow(0, piece.start, piece.numel)
