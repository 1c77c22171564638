"""Shards <-> gradient workers: frozen plans of what moves; ``comm/message.py`` carries them out."""

from collections.abc import Callable, Mapping, Sequence

from ds_kfac.comm.message import Move, RelayoutPlan, in_order
from ds_kfac.zero.shards import ShardMap


def plan_gather(shards: ShardMap, owners: Mapping[int, int]) -> RelayoutPlan:
    """What the owners lack of partitioned gradients. ``owners``: parameter -> rank."""
    in_place = {(shard.param, shard.start) for shard in shards.shards if shard.rank == owners[shard.param]}
    moves = [
        Move(shard.param, shard.start, shard.numel, shard.rank, owners[shard.param])
        for shard in shards.shards
        if (shard.param, shard.start) not in in_place
    ]
    return RelayoutPlan(shards.world, in_order(moves))


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
    return RelayoutPlan(shards.world, in_order(moves))


def source(workers: Sequence[int], rank: int, world: int) -> int:
    """The worker whose result a rank gets: itself, or the one in its row of consecutive ranks."""
    return workers[rank // (world // len(workers))]
