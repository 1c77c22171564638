"""Where gradients of parameters of given sizes lie, one after the other in one group."""

from collections.abc import Sequence

from ds_kfac.zero.shards import ShardMap, partition_chunks, partition_flat


def flat_map(numels: Sequence[int], world: int) -> ShardMap:
    """ZeRO-1/2: padded to a multiple of the world."""
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    size = -(-sum(numels) // world)
    places = enumerate(zip(numels, offsets, strict=True))
    shards = [
        shard for i, (numel, at) in places for shard in partition_flat(numel, i, 0, at, size, world)
    ]
    return ShardMap(world, tuple(numels), tuple(shards))


def chunk_map(numels: Sequence[int], world: int) -> ShardMap:
    """ZeRO-3."""
    shards = [
        shard for i, numel in enumerate(numels) for shard in partition_chunks(numel, i, 0, 0, world)
    ]
    return ShardMap(world, tuple(numels), tuple(shards))
