"""Numbers that ranks tell each other along with a message: named scalars, whose places are known beforehand."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ds_kfac.mail import Arrivals, Leg
from ds_kfac.zero.relayout import Move, RelayoutPlan


class Board:
    """Which rank tells which numbers, in this step.

    Args:
        names: per rank, what it tells; the same on every rank.
        rows: ranks that tell each other, such as all of them; None: everyone tells everyone.
    """

    def __init__(self, names: Sequence[Sequence[Hashable]], rank: int, rows: Sequence[Sequence[int]] | None = None):
        self.names, self.rank = names, rank
        self.rows = tuple(map(tuple, rows)) if rows is not None else (tuple(range(len(names))),)

    @cached_property
    def plan(self) -> RelayoutPlan:
        """A rank's numbers to each other one of its row."""
        moves = [
            Move(source, 0, len(self.names[source]), source, target)
            for row in self.rows
            for source in row
            for target in row
            if source != target and self.names[source]
        ]
        return RelayoutPlan(len(self.names), tuple(moves))

    def leg(self, values: Mapping[Hashable, Tensor], device: torch.device) -> Leg:
        """To send this rank's numbers; fp32 scalars on the device."""
        own = [values[name].float().reshape(()) for name in self.names[self.rank]]
        self._own = torch.stack(own) if own else torch.zeros(0, device=device)
        return Leg("numbers", self.plan, lambda move: self._own, torch.float32)

    def read(self, received: Arrivals) -> dict[int, Tensor]:
        """Rank -> the numbers it told, in the order of its names; own ones included, in rank order."""
        told = {move.param: piece for move, piece in received} | {self.rank: self._own}
        return {rank: told[rank] for rank in sorted(told)}

    def named(self, received: Arrivals) -> dict[Hashable, Tensor]:
        """Name -> number, of names that only one rank tells."""
        return {
            name: number
            for rank, numbers in self.read(received).items()
            for name, number in zip(self.names[rank], numbers, strict=True)
        }
