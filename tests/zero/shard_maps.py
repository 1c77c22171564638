"""Where gradients of parameters of given sizes lie, one after the other in one group."""

from collections.abc import Sequence

from ds_kfac.zero.shards import ShardMap, partition_chunks, partition_flat


def flat_map(numels: Sequence[int], world: int) -> ShardMap:
    """ZeRO-1/2: padded to a multiple of the world."""
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    size = -(-sum(numels) // world)
    return ShardMap(world, tuple(numels), tuple(partition_flat(numels, offsets, range(len(numels)), 0, size, world)))


def chunk_map(numels: Sequence[int], world: int) -> ShardMap:
    """ZeRO-3."""
    shards = [shard for i, numel in enumerate(numels) for shard in partition_chunks(numel, i, 0, 0, world)]
    return ShardMap(world, tuple(numels), tuple(shards))
