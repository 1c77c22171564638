"""Pieces of several kinds and dtypes, between any ranks, in one all-to-all of bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.traffic import Channel
from ds_kfac.zero.relayout import Move, RelayoutPlan

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


def deliver(legs: Sequence[Leg], channel: Channel, device: torch.device) -> list[Arrivals]:
    """Send this rank's pieces of all legs, return per leg those it received. One collective for all of them; none if
    nothing moves anywhere."""
    rank, world = channel.rank, channel.world
    if not any(leg.plan.moves for leg in legs):  # the same on every rank, so nobody is left waiting
        return [[] for _ in legs]
    outgoing = [sum(leg.padded(rank, target) for leg in legs) for target in range(world)]
    incoming = [sum(leg.padded(source, rank) for leg in legs) for source in range(world)]
    sent = torch.empty(sum(outgoing), dtype=torch.uint8, device=device)
    start = 0
    for target in range(world):
        for leg in legs:
            view = sent.narrow(0, start, leg.nbytes(rank, target)).view(leg.dtype)
            start += leg.padded(rank, target)
            place = 0
            for move in leg.plan.between(rank, target):
                view.narrow(0, place, move.numel).copy_(leg.piece(move))
                place += move.numel
    carries: dict[str, tuple[int, int]] = {}
    for leg in legs:
        if leg.plan.moves:
            to, from_ = carries.get(leg.kind, (0, 0))
            for other in (other for other in range(world) if other != rank):
                to, from_ = to + leg.nbytes(rank, other), from_ + leg.nbytes(other, rank)
            carries[leg.kind] = to, from_
    received, _ = channel.all_to_all(sent, outgoing, incoming, carries=carries)
    arrivals: list[Arrivals] = [[] for _ in legs]
    start = 0
    for source in range(world):
        for leg, pieces in zip(legs, arrivals, strict=True):
            view = received.narrow(0, start, leg.nbytes(source, rank)).view(leg.dtype)
            start += leg.padded(source, rank)
            place = 0
            for move in leg.plan.between(source, rank):
                pieces.append((move, view.narrow(0, place, move.numel)))
                place += move.numel
    return arrivals
