"""Shards <-> owner: a frozen plan with an inverse, and its execution as one all-to-all each way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_kfac.zero.shards import ShardMap


@dataclass(frozen=True, order=True)
class Move:
    """Elements start .. start + numel of a flattened parameter travel from ``source`` to ``target``."""

    param: int
    start: int
    numel: int
    source: int
    target: int


@dataclass(frozen=True)
class RelayoutPlan:
    """Every piece that changes ranks; pieces already in place are not in it. The same on every rank."""

    world: int
    moves: tuple[Move, ...]

    def inverse(self) -> "RelayoutPlan":
        """The plan that sends every piece back."""
        return RelayoutPlan(
            self.world, tuple(sorted(Move(m.param, m.start, m.numel, m.target, m.source) for m in self.moves))
        )

    @cached_property
    def _order(self) -> Mapping[tuple[int, int], tuple[Move, ...]]:
        order: dict[tuple[int, int], list[Move]] = {}
        for move in sorted(self.moves):
            order.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in order.items()}

    def between(self, source: int, target: int) -> tuple[Move, ...]:
        """Moves from ``source`` to ``target`` in the order in which they lie in the message."""
        return self._order.get((source, target), ())

    def numel(self, source: int, target: int) -> int:
        return sum(move.numel for move in self.between(source, target))

    @property
    def total_numel(self) -> int:
        """Elements on the wire, summed over all ranks."""
        return sum(move.numel for move in self.moves)

    def execute(
        self, rank: int, piece: Callable[[Move], Tensor], *, dtype: torch.dtype, device: torch.device, group: Any
    ) -> list[tuple[Move, Tensor]]:
        """Send this rank's pieces, return those it received. One collective; none if the plan moves nothing.

        Args:
            piece: gives the flat elements of a move whose source is this rank.
            dtype: on the wire; every rank must give the same.
        """
        if not self.moves:  # the same on every rank, so nobody is left waiting
            return []
        outgoing = [self.numel(rank, target) for target in range(self.world)]
        incoming = [self.numel(source, rank) for source in range(self.world)]
        sent = torch.empty(sum(outgoing), dtype=dtype, device=device)
        received = torch.empty(sum(incoming), dtype=dtype, device=device)
        start = 0
        for target in range(self.world):
            for move in self.between(rank, target):
                sent.narrow(0, start, move.numel).copy_(piece(move))
                start += move.numel
        dist.all_to_all_single(received, sent, output_split_sizes=incoming, input_split_sizes=outgoing, group=group)
        pieces, start = [], 0
        for source in range(self.world):
            for move in self.between(source, rank):
                pieces.append((move, received.narrow(0, start, move.numel)))
                start += move.numel
        return pieces


def plan_gather(shards: ShardMap, owners: Mapping[int, int]) -> RelayoutPlan:
    """What the owners lack. ``owners``: parameter -> rank. A replicated parameter needs nothing."""
    in_place = {(shard.param, shard.start) for shard in shards.shards if shard.rank == owners[shard.param]}
    moves = [
        Move(shard.param, shard.start, shard.numel, shard.rank, owners[shard.param])
        for shard in shards.shards
        if (shard.param, shard.start) not in in_place
    ]
    return RelayoutPlan(shards.world, tuple(sorted(moves)))


def plan_scatter(shards: ShardMap, owners: Mapping[int, int]) -> RelayoutPlan:
    """The owners' results to every rank that holds a shard: the gather's inverse, unless gradients are replicated."""
    moves = [
        Move(shard.param, shard.start, shard.numel, owners[shard.param], shard.rank)
        for shard in shards.shards
        if shard.rank != owners[shard.param]
    ]
    return RelayoutPlan(shards.world, tuple(sorted(moves)))
