"""All traffic of K-FAC between ranks, counted by kind.

A message is one all-to-all of bytes. It consists of parts, which may differ in kind and dtype. Each
part has a plan that lists which elements travel between which ranks. Scalars are also sent as a
part of a message.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar

import deepspeed.comm as dist
import torch
import torch.distributed
from torch import Tensor

from ds_kfac.comm.lost import naming

K = TypeVar("K")
T = TypeVar("T")

SHOWN = 4
"""An error lists at most this many problems of each rank."""


def gathered(value: T, group: Any = None) -> list[T]:
    """Return a list with the ``value`` of each rank of a group, in rank order. Values are pickled.
    Collective.

    Args:
        group: process group; None: all ranks of the job.
    """
    everyone = [value] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, value, group=group)
    return everyone


def merged(entries: Mapping[K, T], group: Any) -> dict[K, T]:
    """Return one dictionary with the entries of all ranks. If several ranks have a key, the value
    of the highest of these ranks counts. Collective."""
    return {key: value for each in gathered(entries, group) for key, value in each.items()}


@contextmanager
def failing_together(
    headline: str, group: Any, error: type[Exception] = RuntimeError
) -> Iterator[list[str]]:
    """Run local work that may fail on some ranks only, inside the ``with`` block. The work reports
    a problem by raising, or by appending a text to the yielded list. If any rank has a problem,
    every rank raises ``error`` with ``headline`` and the problems of all ranks. Collective."""
    problems: list[str] = []
    try:
        yield problems
    except Exception as problem:  # not swallowed: every rank raises it below
        problems.append(f"{type(problem).__name__}: {problem}")
    lines = []
    for rank, texts in enumerate(gathered(problems, group)):
        lines += [f"rank {rank}: {text}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            lines.append(f"rank {rank}: and {len(texts) - SHOWN} more")
    if lines:
        raise error(headline + "\n  " + "\n  ".join(lines))


class Channel:
    """A process group that only K-FAC uses, with counters of its traffic. Because the group is
    separate, ranks may interleave K-FAC's traffic with DeepSpeed's reductions and prefetches in
    different orders.

    Collective: every rank of the job must create a channel at the same time, but different ranks
    may pass different groups. The channel connects the ranks of the group.

    Attributes:
        calls: kind of data -> number of collectives entered. A collective that carries several
            kinds counts for the first of them.
        sent: kind of data -> payload bytes sent to other ranks.
        received: kind of data -> payload bytes received from other ranks.
    """

    def __init__(self, group: Any) -> None:
        self._own: OwnGroup | None = own_group(group)
        self.group = self._own.group
        self.rank = dist.get_rank(self.group)
        self.world = dist.get_world_size(self.group)
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def close(self) -> None:
        """Leave the group. The last channel that uses the group destroys it. Local, because other
        ranks may no longer exist. May be called twice."""
        own = self._own
        self._own = None
        self.group = None
        if own is not None:
            own.close()

    def sum(self, vector: Tensor, kind: str = "numbers") -> Tensor:
        """Sum a small vector over the ranks of the group, in place, and return it. Collective."""
        self.calls[kind] += 1
        with naming("numbers of all layers", self):
            dist.all_reduce(vector, group=self.group)
        nbytes = vector.numel() * vector.element_size()
        self.sent[kind] += nbytes
        self.received[kind] += nbytes
        return vector

    def all_to_all(
        self,
        sent: Tensor,
        outgoing: list[int],
        incoming: list[int],
        bytes_by_kind: Mapping[str, tuple[int, int]],
    ) -> tuple[Tensor, Any]:
        """Send ``outgoing[r]`` elements to each rank r, and receive ``incoming[r]`` elements from
        each rank r. Collective.

        Args:
            sent: flat tensor with the elements for all ranks, in rank order.
            bytes_by_kind: kind of data -> (payload bytes to other ranks, payload bytes from other
                ranks).

        Returns the received tensor, and a handle to wait for before the tensor is read.
        """
        received = sent.new_empty(sum(incoming))
        self.calls[next(iter(bytes_by_kind))] += 1
        with naming(", ".join(bytes_by_kind), self):
            # deepspeed.comm's all_to_all_single is not used, because its log of stragglers assumes
            # that sizes are the same on all ranks.
            handle = torch.distributed.all_to_all_single(
                output=received,
                input=sent,
                output_split_sizes=incoming,
                input_split_sizes=outgoing,
                group=self.group,
                async_op=True,
            )
        for kind, (sent_bytes, received_bytes) in bytes_by_kind.items():
            self.sent[kind] += sent_bytes
            self.received[kind] += received_bytes
        return received, handle


@dataclass(eq=False)
class OwnGroup:
    """A process group that DeepSpeed does not use.

    Channels with the same ranks share one group. If each channel had its own group, groups would
    accumulate, because a ZeRO engine that is not destroyed lives as long as its process. Channels
    that share a group must enter their collectives in the same order on all ranks, as engines do
    with DeepSpeed's groups.

    Attributes:
        ranks: members of the group, as ranks of the job.
        number: index of the :func:`own_group` call that created this group. It is the same
            on all ranks of the group.
        timeout: timeout of the group's collectives; None: the backend's default.
        channels: number of open channels that use the group. The last channel to close destroys the
            group.
    """

    group: Any
    ranks: tuple[int, ...]
    number: int
    timeout: timedelta | None
    channels: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether the group still exists. Destroying the job's default group destroys all
        groups."""
        return self.group in torch.distributed.distributed_c10d._world.pg_map

    def close(self) -> None:
        """Count one channel as closed. If no open channel is left, destroy the group."""
        self.channels -= 1
        if not self.channels:
            if _own_groups.get(self.ranks) is self:
                del _own_groups[self.ranks]
            if self.is_alive:
                torch.distributed.destroy_process_group(self.group)


_own_groups: dict[tuple[int, ...], OwnGroup] = {}
_calls = count()


def own_group(group: Any) -> OwnGroup:
    """Return a group for K-FAC with the same ranks as ``group`` and with the job's timeout.
    (DeepSpeed's own groups do not inherit the job's timeout.)

    The most recent group with these ranks is reused if all of its ranks still have it. Otherwise a
    new group is created. Collective over the job; different ranks may pass different groups.
    """
    world = torch.distributed.distributed_c10d._get_default_group()
    options = [
        getattr(world._get_backend(device), "options", None) for device in world._device_types
    ]
    # some backends do not expose their options
    timeout = next((option._timeout for option in options if option is not None), None)
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    call = next(_calls)
    last = _own_groups.get(ranks)
    number = None  # number of the group that this rank could reuse
    if last is not None and last.is_alive and last.timeout == timeout:
        number = last.number
    numbers: dict[tuple[int, ...], set[int | None]] = {}
    for members, its_number in gathered((ranks, number)):
        numbers.setdefault(members, set()).add(its_number)
    for members in sorted(numbers):  # every rank takes part in creating every group
        if None in numbers[members] or len(numbers[members]) > 1:
            made = torch.distributed.new_group(list(members), timeout=timeout)
            if members == ranks:
                _own_groups[ranks] = OwnGroup(made, ranks, call, timeout)
    own = _own_groups[ranks]
    own.channels += 1
    return own


@dataclass(frozen=True)
class Move:
    """Elements start .. start + numel - 1 of a flattened parameter, which travel from rank
    ``source`` to rank ``target``.

    Attributes:
        param: in message parts with gradients or results, the index of the parameter. In other
            parts, the index of a factor, the index of a piece of a sum, or the sending rank.
    """

    param: int
    start: int
    numel: int
    source: int
    target: int


@dataclass(frozen=True)
class RelayoutPlan:
    """Plan of the moves of one message part. Elements that are already on their target rank are not
    listed.

    A plan may contain the moves of all ranks. It may also contain only the moves that start or end
    at one rank, because the messages of that rank need no other moves.
    """

    world: int
    moves: tuple[Move, ...]

    @cached_property
    def moved(self) -> Mapping[tuple[int, int], tuple[Move, ...]]:
        """(source, target) -> moves from source to target, in the order of their elements in a
        message."""
        by_pair: dict[tuple[int, int], list[Move]] = {}
        # there may be millions of moves, and comparing dataclasses is slow
        order = attrgetter("param", "start", "numel", "source", "target")
        for move in sorted(self.moves, key=order):
            by_pair.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in by_pair.items()}

    @cached_property
    def sizes(self) -> Mapping[tuple[int, int], list[int]]:
        """(source, target) -> number of elements of each move in :attr:`moved`."""
        return {pair: [move.numel for move in moves] for pair, moves in self.moved.items()}

    @property
    def total_numel(self) -> int:
        """Number of elements of all moves together."""
        return sum(move.numel for move in self.moves)


ALIGNMENT = 16
"""Each part of a message starts at a multiple of this many bytes, so that it can be viewed in its
own dtype."""

Arrivals = list[tuple[Move, Tensor]]
"""List of (move, its flat elements) pairs, for the moves of a message part whose target is this
rank."""


@dataclass(frozen=True)
class MessagePart:
    """The part of a message that holds data of one kind.

    Attributes:
        kind: name under which the bytes of the part are counted.
        plan: moves of the part. Moves between two other ranks may be missing. A move that starts or
            ends at this rank must also be in the plan of the rank at its other end.
        piece: function that returns the flat elements of a move. It is called for the moves whose
            source is this rank.
        dtype: dtype on the wire, the same on every rank.
    """

    kind: str
    plan: RelayoutPlan
    piece: Callable[[Move], Tensor]
    dtype: torch.dtype


class Message:
    """A message that is being sent. Creating it is collective: all ranks must create their messages
    in the same order.

    Args:
        parts: parts of the message, at least one.
        packed: function that may free the memory of the pieces. It is called after the pieces have
            been copied to the send buffer, and before the receive buffer is allocated.
    """

    def __init__(
        self,
        parts: Sequence[MessagePart],
        channel: Channel,
        device: torch.device,
        packed: Callable[[], None] | None = None,
    ) -> None:
        rank = channel.rank
        ranks = range(channel.world)
        self.parts = parts
        self._channel = channel
        outgoing = BufferLayout(parts, [(rank, target) for target in ranks])
        self._incoming = BufferLayout(parts, [(source, rank) for source in ranks])
        # kept alive until the message has been sent
        self._sent = torch.empty(sum(outgoing.sizes), dtype=torch.uint8, device=device)
        for slot in outgoing.slots:
            for move, place in slot.pieces(self._sent):
                place.copy_(slot.part.piece(move))
        if packed is not None:
            packed()
        sent_bytes = outgoing.payload(rank)
        received_bytes = self._incoming.payload(rank)
        bytes_by_kind = {
            part.kind: (sent_bytes[part.kind], received_bytes[part.kind])
            for part in parts
            if part.plan.moves
        }
        self._received, self._handle = channel.all_to_all(
            self._sent,
            outgoing.sizes,
            self._incoming.sizes,
            bytes_by_kind or {parts[0].kind: (0, 0)},
        )

    def wait(self) -> list[Arrivals]:
        """Wait for the message, and return the arrivals of each part."""
        kinds = dict.fromkeys(part.kind for part in self.parts if part.plan.moves)
        with naming(", ".join(kinds), self._channel):
            self._handle.wait()
        del self._sent
        arrivals: dict[int, Arrivals] = {id(part): [] for part in self.parts}
        for slot in self._incoming.slots:
            arrivals[id(slot.part)] += slot.pieces(self._received)
        return list(arrivals.values())


@dataclass(frozen=True)
class BufferSlot:
    """Range of bytes in a buffer. It holds the elements that one part moves from one rank to
    another.

    Attributes:
        pair: (source, target).
        start: first byte.
        nbytes: number of bytes, without the padding that follows them.
    """

    part: MessagePart
    pair: tuple[int, int]
    start: int
    nbytes: int

    def pieces(self, buffer: Tensor) -> Arrivals:
        """Return (move, view of its elements in ``buffer``) pairs for the moves of the slot."""
        elements = buffer.narrow(0, self.start, self.nbytes).view(self.part.dtype)
        plan = self.part.plan
        return [*zip(plan.moved[self.pair], elements.split(plan.sizes[self.pair]), strict=True)]


class BufferLayout:
    """Positions of the parts of a message in its send buffer or in its receive buffer.

    Args:
        pairs: (source, target) pairs of ranks, in the order in which their elements are in the
            buffer.

    Attributes:
        sizes: number of bytes for each pair, including padding.
        slots: slots of all parts and pairs, in the order of the buffer.
    """

    def __init__(self, parts: Sequence[MessagePart], pairs: Sequence[tuple[int, int]]) -> None:
        self.sizes: list[int] = []
        self.slots: list[BufferSlot] = []
        start = 0
        for pair in pairs:
            first = start
            for part in parts:
                if pair in part.plan.sizes:
                    nbytes = sum(part.plan.sizes[pair]) * part.dtype.itemsize
                    self.slots.append(BufferSlot(part, pair, start, nbytes))
                    start += -(-nbytes // ALIGNMENT) * ALIGNMENT
            self.sizes.append(start - first)

    def payload(self, rank: int) -> Counter[str]:
        """Return a counter from kind of data to the number of bytes in the buffer that come from or
        go to ranks other than ``rank``. Padding is not included."""
        payload = Counter[str]()
        for slot in self.slots:
            if slot.pair != (rank, rank):
                payload[slot.part.kind] += slot.nbytes
        return payload


def deliver(
    parts: Sequence[MessagePart],
    channel: Channel,
    device: torch.device,
    packed: Callable[[], None] | None = None,
) -> list[Arrivals]:
    """Send this rank's pieces of all parts. Return one list of arrivals for each part.

    The call is one collective if any part has a move, otherwise it is local. So all ranks must
    agree on whether any part has a move.

    Args:
        packed: see :class:`Message`.
    """
    if any(part.plan.moves for part in parts):
        return Message(parts, channel, device, packed).wait()
    if packed is not None:
        packed()
    return [[] for _ in parts]


class SummedVector:
    """Adds up one vector from each rank of a row. Each rank sends its vector to all other ranks of
    its row, and adds up the vectors of the row in rank order. The sum is therefore bitwise
    identical on all ranks of the row.

    Args:
        numel: number of elements of a vector.
        rows: rows of the KAISA grid, which are groups of ranks. Each rank is in one row.
    """

    def __init__(self, numel: int, world: int, rank: int, rows: Sequence[Sequence[int]]) -> None:
        pairs = [
            (source, target) for row in rows for source in row for target in row if source != target
        ]
        self.plan = RelayoutPlan(
            world, tuple(Move(source, 0, numel, source, target) for source, target in pairs)
        )
        self.rank = rank
        self._own: Tensor | None = None

    def part(self, own: Tensor) -> MessagePart:
        """Return the message part with this rank's fp32 vector."""
        self._own = own
        return MessagePart("numbers", self.plan, lambda move: own, torch.float32)

    def total(self, received: Arrivals) -> Tensor:
        """Return the sum of this rank's vector and the received vectors."""
        assert self._own is not None
        vectors = {move.source: vector for move, vector in received} | {self.rank: self._own}
        self._own = None
        return torch.stack([vectors[rank] for rank in sorted(vectors)]).sum(dim=0)


def stacked(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return an fp32 vector of ``values``, which are scalar tensors on the device and Python
    numbers. Python numbers are filled in on the device, which avoids a copy from the host."""
    if not values:
        return torch.zeros(0, device=device, dtype=torch.float32)
    numbers = {x for x in values if not isinstance(x, Tensor)}
    filled = {x: torch.full((), x, device=device, dtype=torch.float32) for x in numbers}
    return torch.stack(
        [x.float().reshape(()) if isinstance(x, Tensor) else filled[x] for x in values]
    )


class Scalars:
    """Scalars that each rank sends to all other ranks in a step.

    Args:
        names: for each rank, the names of the scalars that the rank sends. ``names`` must be the
            same on every rank, and no two ranks may send the same name.
    """

    def __init__(self, names: Sequence[Sequence[Hashable]], rank: int) -> None:
        self.names = names
        self.rank = rank

    @cached_property
    def plan(self) -> RelayoutPlan:
        """The moves from this rank to all other ranks, and from all other ranks to this rank. Moves
        between two other ranks are left out. With them, the host's time for a step would be
        quadratic in the number of ranks."""
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        mine = len(self.names[self.rank])
        moves = []
        for other in others:
            theirs = len(self.names[other])
            if mine:
                moves.append(Move(self.rank, 0, mine, self.rank, other))
            if theirs:
                moves.append(Move(other, 0, theirs, other, self.rank))
        return RelayoutPlan(len(self.names), tuple(moves))

    def part(self, values: Mapping[Hashable, Tensor | float], device: torch.device) -> MessagePart:
        """Return the message part with this rank's scalars, in fp32 on the device.

        Args:
            values: name of a scalar -> scalar tensor on the device, or Python number.
        """
        self._sent = stacked([values[name] for name in self.names[self.rank]], device)
        return MessagePart("numbers", self.plan, lambda move: self._sent, torch.float32)

    def read(self, received: Arrivals) -> dict[Hashable, Tensor]:
        """Return the scalars of all ranks, in a dict by name."""
        # copied, because a view would keep the whole message in memory
        sent = {move.param: piece.clone() for move, piece in received} | {self.rank: self._sent}
        return {
            name: number
            for rank in sorted(sent)
            for name, number in zip(self.names[rank], sent[rank], strict=True)
        }
