"""Packs several messages of different dtypes into one all-to-all of bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.comm.channel import Channel
from ds_kfac.comm.moves import Move, RelayoutPlan

ALIGNMENT = 16
"""Bytes; every leg of a message starts at a multiple, so that it can be viewed in its own dtype."""

Arrivals = list[tuple[Move, Tensor]]


@dataclass(frozen=True)
class Leg:
    """One kind of content.

    Attributes:
        kind: for the accounting.
        plan: what moves; the same on every rank.
        piece: gives the flat elements of a move whose source is this rank.
        dtype: on the wire, the same on every rank.
    """

    kind: str
    plan: RelayoutPlan
    piece: Callable[[Move], Tensor]
    dtype: torch.dtype

    def nbytes(self, source: int, target: int) -> int:
        """Of the payload between two ranks."""
        return self.plan.numel(source, target) * self.dtype.itemsize

    def padded(self, source: int, target: int) -> int:
        return -(-self.nbytes(source, target) // ALIGNMENT) * ALIGNMENT


def deliver(
    legs: Sequence[Leg], channel: Channel, device: torch.device, packed: Callable[[], None] = lambda: None
) -> list[Arrivals]:
    """Send this rank's pieces of all legs, return per leg those it received. One collective for all of them; none if
    nothing moves anywhere.

    Args:
        legs: their plans hold every rank's moves.
        packed: called when the pieces have been copied, before there is memory for what is received.
    """
    if not any(leg.plan.moves for leg in legs):  # the same on every rank, so nobody is left waiting
        packed()
        return [[] for _ in legs]
    return Posted(legs, channel, device, packed).wait()


class Posted:
    """A message on its way. Collective: made on every rank, in the same order.

    Args:
        legs: at least one. Moves between other ranks may be missing from their plans.
        packed: called when the pieces have been copied.
    """

    def __init__(
        self, legs: Sequence[Leg], channel: Channel, device: torch.device, packed: Callable[[], None] = lambda: None
    ) -> None:
        self.legs, self.rank, self.world = legs, channel.rank, channel.world
        ranks = range(self.world)
        outgoing = [sum(leg.padded(self.rank, target) for leg in legs) for target in ranks]
        incoming = [sum(leg.padded(source, self.rank) for leg in legs) for source in ranks]
        sent = torch.empty(sum(outgoing), dtype=torch.uint8, device=device)
        for leg, target, view in self._views(sent, [(self.rank, target) for target in ranks]):
            place = 0
            for move in leg.plan.between(self.rank, target):
                view.narrow(0, place, move.numel).copy_(leg.piece(move))
                place += move.numel
        packed()
        self._sent = sent  # until it has left
        self._received, self._handle = channel.all_to_all(sent, outgoing, incoming, carries=self._carries(), wait=False)

    def wait(self) -> list[Arrivals]:
        """What arrived, per leg."""
        self._handle.wait()
        del self._sent
        arrivals: dict[int, Arrivals] = {id(leg): [] for leg in self.legs}
        for leg, source, view in self._views(self._received, [(source, self.rank) for source in range(self.world)]):
            place = 0
            for move in leg.plan.between(source, self.rank):
                arrivals[id(leg)].append((move, view.narrow(0, place, move.numel)))
                place += move.numel
        return list(arrivals.values())

    def _views(self, flat: Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[Leg, int, Tensor]]:
        """The parts of a message in their order: leg, the other rank, elements."""
        start = 0
        for source, target in pairs:
            for leg in self.legs:
                view = flat.narrow(0, start, leg.nbytes(source, target)).view(leg.dtype)
                start += leg.padded(source, target)
                yield leg, target if source == self.rank else source, view

    def _carries(self) -> dict[str, tuple[int, int]]:
        """Kind -> bytes to and from other ranks; the first leg's kind in any case."""
        carries = {self.legs[0].kind: (0, 0)} if not any(leg.plan.moves for leg in self.legs) else {}
        for leg in self.legs:
            if leg.plan.moves:
                to, from_ = carries.get(leg.kind, (0, 0))
                for other in (other for other in range(self.world) if other != self.rank):
                    to, from_ = to + leg.nbytes(self.rank, other), from_ + leg.nbytes(other, self.rank)
                carries[leg.kind] = to, from_
        return carries
