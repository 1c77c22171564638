"""All network traffic of K-FAC, counted by kind.

A message is one all-to-all of bytes. It has parts of several kinds and dtypes, each with a frozen
plan of its moves, the same on every rank; scalars that ranks exchange are such a part.
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
"""Problems of a rank that an error lists."""


def gathered(value: T, group: Any = None) -> list[T]:
    """Each rank's object, by rank of a group (None: the job); pickled. Collective."""
    everyone = [value] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, value, group=group)
    return everyone


def merged(entries: Mapping[K, T], group: Any) -> dict[K, T]:
    """The entries of all ranks; of equal keys the last rank's. Collective."""
    return {key: value for each in gathered(entries, group) for key, value in each.items()}


@contextmanager
def failing_together(
    headline: str, group: Any, error: type[Exception] = RuntimeError
) -> Iterator[list[str]]:
    """Wraps local work that may fail on some ranks only; the work appends problems to the yielded
    list, or raises. Collective. If any rank had a problem, raises ``error`` on every rank, with
    ``headline`` and all ranks' problems."""
    problems: list[str] = []
    try:
        yield problems
    except Exception as problem:  # not swallowed: raised below on every rank
        problems.append(f"{type(problem).__name__}: {problem}")
    lines = []
    for rank, texts in enumerate(gathered(problems, group)):
        lines += [f"rank {rank}: {text}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            lines.append(f"rank {rank}: and {len(texts) - SHOWN} more")
    if lines:
        raise error(headline + "\n  " + "\n  ".join(lines))


class Channel:
    """A process group of K-FAC's own, so that its traffic is not ordered against DeepSpeed's
    reductions and prefetches, with counters. Collective: every rank of the job makes one, each with
    the group whose ranks it connects.

    Attributes:
        calls: kind -> collectives entered; one that carries several kinds counts for the first.
        sent, received: kind -> payload bytes to and from other ranks.
    """

    def __init__(self, group: Any) -> None:
        self._own: OwnGroup | None = own_group(group)
        self.group = self._own.group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def close(self) -> None:
        """Leave the group; the last channel that uses it ends it. May be called twice. Local:
        others may be gone."""
        own, self._own, self.group = self._own, None, None
        if own is not None:
            own.close()

    def sum(self, vector: Tensor, kind: str = "numbers") -> Tensor:
        """Sum a small vector over all ranks, in place. Collective."""
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
        carries: Mapping[str, tuple[int, int]],
    ) -> tuple[Tensor, Any]:
        """Send ``outgoing[r]`` elements to each rank r, and receive ``incoming[r]`` from it.

        Args:
            sent: flat, what goes to each rank, in rank order.
            carries: kind -> (bytes to, bytes from) other ranks.

        Returns the received tensor, and a handle to wait for before it is read.
        """
        received = sent.new_empty(sum(incoming))
        self.calls[next(iter(carries))] += 1
        with naming(", ".join(carries), self):
            # not by deepspeed.comm: its log of stragglers adds up sizes that it takes to be the
            # same on all ranks
            handle = torch.distributed.all_to_all_single(
                output=received,
                input=sent,
                output_split_sizes=incoming,
                input_split_sizes=outgoing,
                group=self.group,
                async_op=True,
            )
        for kind, (to, from_) in carries.items():
            self.sent[kind] += to
            self.received[kind] += from_
        return received, handle


@dataclass(eq=False)
class OwnGroup:
    """A process group that DeepSpeed does not use. There is one for each set of ranks, shared by
    channels: a ZeRO engine that is not destroyed lives as long as its process, and groups of their
    own would pile up. Channels enter a shared group's collectives in the program's order, as
    engines do with DeepSpeed's groups.

    Attributes:
        number: number of the call of :func:`own_group` that made it, the same on all its ranks.
        channels: number of open channels; the last to close ends the group.
    """

    group: Any
    ranks: tuple[int, ...]
    number: int
    timeout: timedelta | None
    channels: int = 0

    @property
    def is_alive(self) -> bool:
        """False once it has ended with the job's default group, as all groups do."""
        return self.group in torch.distributed.distributed_c10d._world.pg_map

    def close(self) -> None:
        """Close one channel."""
        self.channels -= 1
        if not self.channels:
            if _own_groups.get(self.ranks) is self:
                del _own_groups[self.ranks]
            if self.is_alive:
                torch.distributed.destroy_process_group(self.group)


_own_groups: dict[tuple[int, ...], OwnGroup] = {}
_calls = count()


def own_group(group: Any) -> OwnGroup:
    """The group with the same ranks as ``group``, with the job's timeout, which DeepSpeed's own
    groups do not inherit. A new one, unless all these ranks still have the last one. Collective
    over the job; ranks' groups may differ."""
    world = torch.distributed.distributed_c10d._get_default_group()
    options = [
        getattr(world._get_backend(device), "options", None) for device in world._device_types
    ]
    # a backend may hide it
    timeout = next((option._timeout for option in options if option is not None), None)
    ranks, call = tuple(torch.distributed.get_process_group_ranks(group)), next(_calls)
    last = _own_groups.get(ranks)
    number = last.number if last is not None and last.is_alive and last.timeout == timeout else None
    numbers: dict[tuple[int, ...], set[int | None]] = {}
    for members, its_number in gathered((ranks, number)):
        numbers.setdefault(members, set()).add(its_number)
    for members in sorted(numbers):  # torch: every rank of the job takes part in making every group
        if None in numbers[members] or len(numbers[members]) > 1:
            made = torch.distributed.new_group(list(members), timeout=timeout)
            if members == ranks:
                _own_groups[ranks] = OwnGroup(made, ranks, call, timeout)
    own = _own_groups[ranks]
    own.channels += 1
    return own


@dataclass(frozen=True)
class Move:
    """Elements start .. start + numel of a flattened parameter travel from ``source`` to
    ``target``."""

    param: int
    start: int
    numel: int
    source: int
    target: int


@dataclass(frozen=True)
class RelayoutPlan:
    """Moves between ranks. Elements that are in place are not listed. Either all moves, the same on
    every rank, or those of one rank: a message needs no others."""

    world: int
    moves: tuple[Move, ...]

    @cached_property
    def moved(self) -> Mapping[tuple[int, int], tuple[Move, ...]]:
        """(source, target) -> moves in the order in which they lie in a message."""
        order: dict[tuple[int, int], list[Move]] = {}
        # there may be millions, and comparing dataclasses takes several times as long
        for move in sorted(
            self.moves, key=attrgetter("param", "start", "numel", "source", "target")
        ):
            order.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in order.items()}

    @cached_property
    def sizes(self) -> Mapping[tuple[int, int], list[int]]:
        """(source, target) -> numbers of elements of the moves."""
        return {pair: [move.numel for move in moves] for pair, moves in self.moved.items()}

    @property
    def total_numel(self) -> int:
        """Elements on the wire, summed over all ranks."""
        return sum(move.numel for move in self.moves)


ALIGNMENT = 16
"""A part of a message starts at a multiple of this many bytes, so that it can be viewed in its own
dtype."""

Arrivals = list[tuple[Move, Tensor]]


@dataclass(frozen=True)
class MessagePart:
    """One kind of content of a message.

    Attributes:
        kind: name under which its bytes are counted.
        plan: its moves. Moves between two other ranks may be missing. All other moves are the same
            on the two ranks.
        piece: move whose source is this rank -> its flat elements.
        dtype: dtype on the wire, the same on every rank.
    """

    kind: str
    plan: RelayoutPlan
    piece: Callable[[Move], Tensor]
    dtype: torch.dtype


class Message:
    """A message on its way. Collective: made on every rank, in the same order.

    Args:
        parts: at least one.
        packed: called once the pieces are copied, before memory for the received ones is allocated.
    """

    def __init__(
        self,
        parts: Sequence[MessagePart],
        channel: Channel,
        device: torch.device,
        packed: Callable[[], None] | None = None,
    ) -> None:
        self.parts, rank, ranks = parts, channel.rank, range(channel.world)
        outgoing, places, to = _laid_out(parts, [(rank, target) for target in ranks], rank)
        incoming, self._places, from_ = _laid_out(parts, [(source, rank) for source in ranks], rank)
        sent = torch.empty(sum(outgoing), dtype=torch.uint8, device=device)
        for part, pair, start, nbytes in places:
            pieces = sent.narrow(0, start, nbytes).view(part.dtype)
            for move, place in zip(
                part.plan.moved[pair], pieces.split(part.plan.sizes[pair]), strict=True
            ):
                place.copy_(part.piece(move))
        if packed is not None:
            packed()
        self._sent, self._channel = sent, channel  # kept alive until it is sent
        carries = {
            part.kind: (to[part.kind], from_[part.kind]) for part in parts if part.plan.moves
        }
        carries = carries or {parts[0].kind: (0, 0)}
        self._received, self._handle = channel.all_to_all(sent, outgoing, incoming, carries)

    def wait(self) -> list[Arrivals]:
        """Wait; the arrivals of each part."""
        with naming(
            ", ".join(dict.fromkeys(part.kind for part in self.parts if part.plan.moves)),
            self._channel,
        ):
            self._handle.wait()
        del self._sent
        arrivals: dict[int, Arrivals] = {id(part): [] for part in self.parts}
        for part, pair, start, nbytes in self._places:
            pieces = (
                self._received.narrow(0, start, nbytes)
                .view(part.dtype)
                .split(part.plan.sizes[pair])
            )
            arrivals[id(part)] += zip(part.plan.moved[pair], pieces, strict=True)
        return list(arrivals.values())


Places = list[tuple[MessagePart, tuple[int, int], int, int]]
"""(part, (source, target), first byte, bytes)"""


def _laid_out(
    parts: Sequence[MessagePart], pairs: Sequence[tuple[int, int]], rank: int
) -> tuple[list[int], Places, Counter[str]]:
    """Layout of a buffer: bytes of each pair, padding included; the parts' places; kind -> bytes to
    or from others."""
    sizes, places, carried, start = [], [], Counter[str](), 0
    for pair in pairs:
        first = start
        for part in parts:
            if pair in part.plan.sizes:
                nbytes = sum(part.plan.sizes[pair]) * part.dtype.itemsize
                places.append((part, pair, start, nbytes))
                carried[part.kind] += nbytes if pair != (rank, rank) else 0
                start += -(-nbytes // ALIGNMENT) * ALIGNMENT
        sizes.append(start - first)
    return sizes, places, carried


def deliver(
    parts: Sequence[MessagePart],
    channel: Channel,
    device: torch.device,
    packed: Callable[[], None] | None = None,
) -> list[Arrivals]:
    """Send this rank's pieces of all parts, and return those that it received, a list for each
    part. One collective; none if no part has a move, which must be so on every rank or on none.
    ``packed``: see :class:`Message`."""
    if any(part.plan.moves for part in parts):
        return Message(parts, channel, device, packed).wait()
    if packed is not None:
        packed()
    return [[] for _ in parts]


class SummedVector:
    """A vector of each rank that travels to all other ranks of its row, where they are added up in
    rank order.

    Args:
        rows: groups of ranks that exchange their vectors.
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
        """The message part with this rank's vector, fp32."""
        self._own = own
        return MessagePart("numbers", self.plan, lambda move: own, torch.float32)

    def total(self, received: Arrivals) -> Tensor:
        """The sum of this rank's and the received ones."""
        assert self._own is not None
        vectors = {move.source: vector for move, vector in received} | {self.rank: self._own}
        self._own = None
        return torch.stack([vectors[rank] for rank in sorted(vectors)]).sum(dim=0)


class Scalars:
    """Scalars that each rank sends to all others in this step.

    Args:
        names: by rank, names of the scalars that it sends; the same on every rank. A name is of one
            rank only.
    """

    def __init__(self, names: Sequence[Sequence[Hashable]], rank: int) -> None:
        self.names, self.rank = names, rank

    @cached_property
    def plan(self) -> RelayoutPlan:
        """This rank's moves: of its scalars to all other ranks, and of theirs to this rank. Moves
        between two other ranks would make a step's host time quadratic in the number of ranks."""
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
        """The message part with this rank's scalars, tensors or what the host knows: fp32, on the
        device."""
        mine = [values[name] for name in self.names[self.rank]]
        # a fill of each: numbers from a list would be copied
        known = {x for x in mine if not isinstance(x, Tensor)}
        filled = {x: torch.full((), x, device=device, dtype=torch.float32) for x in known}
        scalars = [x.float().reshape(()) if isinstance(x, Tensor) else filled[x] for x in mine]
        self._sent = (
            torch.stack(scalars) if scalars else torch.zeros(0, device=device, dtype=torch.float32)
        )
        return MessagePart("numbers", self.plan, lambda move: self._sent, torch.float32)

    def read(self, received: Arrivals) -> dict[Hashable, Tensor]:
        """Name -> scalar, of all ranks."""
        # copies: a view would keep the whole message
        sent = {move.param: piece.clone() for move, piece in received} | {self.rank: self._sent}
        return {
            name: number
            for rank in sorted(sent)
            for name, number in zip(self.names[rank], sent[rank], strict=True)
        }
