"""Scalars that ranks exchange along with a message; their names and order are known on every rank beforehand."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Leg
from ds_kfac.comm.moves import Move, RelayoutPlan


class Scalars:
    """Which rank sends which scalars in this step.

    Args:
        names: per rank, the names of its scalars; the same on every rank.
        rows: groups of ranks that exchange scalars; None: all with all.
    """

    def __init__(self, names: Sequence[Sequence[Hashable]], rank: int, rows: Sequence[Sequence[int]] | None = None):
        self.names, self.rank = names, rank
        self.rows = tuple(map(tuple, rows)) if rows is not None else (tuple(range(len(names))),)

    @cached_property
    def plan(self) -> RelayoutPlan:
        """A rank's scalars to each other one of its row."""
        moves = [
            Move(source, 0, len(self.names[source]), source, target)
            for row in self.rows
            for source in row
            for target in row
            if source != target and self.names[source]
        ]
        return RelayoutPlan(len(self.names), tuple(moves))

    def leg(self, values: Mapping[Hashable, Tensor], device: torch.device) -> Leg:
        """To send this rank's scalars: fp32, on the device."""
        own = [values[name].float().reshape(()) for name in self.names[self.rank]]
        self._own = torch.stack(own) if own else torch.zeros(0, device=device)
        return Leg("numbers", self.plan, lambda move: self._own, torch.float32)

    def read(self, received: Arrivals) -> dict[int, Tensor]:
        """Scalars received from each rank (including this one), in the order of their names."""
        # copies: a view would keep the whole message
        sent = {move.param: piece.clone() for move, piece in received} | {self.rank: self._own}
        return {rank: sent[rank] for rank in sorted(sent)}

    def named(self, received: Arrivals) -> dict[Hashable, Tensor]:
        """Name -> scalar, of names that only one rank sends."""
        return {
            name: number
            for rank, numbers in self.read(received).items()
            for name, number in zip(self.names[rank], numbers, strict=True)
        }
