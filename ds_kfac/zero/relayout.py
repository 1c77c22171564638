"""Shards <-> gradient workers: frozen plans of what moves; ``mail.py`` carries them out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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


def plan_gather(shards: ShardMap, owners: Mapping[int, int]) -> RelayoutPlan:
    """What the owners lack of partitioned gradients. ``owners``: parameter -> rank."""
    in_place = {(shard.param, shard.start) for shard in shards.shards if shard.rank == owners[shard.param]}
    moves = [
        Move(shard.param, shard.start, shard.numel, shard.rank, owners[shard.param])
        for shard in shards.shards
        if (shard.param, shard.start) not in in_place
    ]
    return RelayoutPlan(shards.world, tuple(sorted(moves)))


def plan_scatter(shards: ShardMap, source: Callable[[int, int], int]) -> RelayoutPlan:
    """Results to every rank that holds a shard: the gather's inverse, unless gradients are replicated.

    Args:
        source: (parameter, rank) -> the worker whose result the rank gets; the rank itself if it is a worker.
    """
    moves = []
    for shard in shards.shards:
        worker = source(shard.param, shard.rank)
        if worker != shard.rank:
            moves.append(Move(shard.param, shard.start, shard.numel, worker, shard.rank))
    return RelayoutPlan(shards.world, tuple(sorted(moves)))


def source(workers: Sequence[int], rank: int, world: int) -> int:
    """The worker whose result a rank gets: itself, or the one in its row of consecutive ranks."""
    if rank in workers:
        return rank
    return workers[rank // (world // len(workers))]
