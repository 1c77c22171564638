"""Where DeepSpeed will put gradients, without an engine: what the layouts of this folder find in one."""

from collections.abc import Sequence

from ds_kfac.zero.shards import Shard, ShardMap, partition_chunks, partition_flat

Group = Sequence[tuple[str, int]]
"""A parameter group of the optimizer: names and sizes of its trained parameters, in its order."""

FLAT_ALIGNMENT = 2
"""ZeRO-1/2 pads the flat buffer of a group to a multiple of so many elements a rank."""


def planned_shards(
    names: Sequence[str],
    groups: Sequence[Group],
    *,
    world: int,
    stage: int,
    replicated: bool = False,
    round_robin: bool = False,
) -> ShardMap:
    """The shards of the parameters ``names``.

    Args:
        stage: of ZeRO. At stage 3 the groups and offsets of shards, which depend on its sub-groups, are left at 0.
        replicated: whether every rank has every averaged gradient at stage 1 too (BF16_Optimizer).
        round_robin: ``round_robin_gradients`` of ZeRO-1/2.
    """
    param = {name: index for index, name in enumerate(names)}
    numels = {name: numel for group in groups for name, numel in group}
    place = {name: index for index, group in enumerate(groups) for name, _ in group}
    shards: list[Shard] = []
    if stage == 0 or replicated:
        shards = [
            Shard(index, 0, numels[name], rank, place[name], 0)
            for name, index in param.items()
            for rank in range(world)
        ]
    elif stage == 3:
        for name, index in param.items():
            shards += partition_chunks(numels[name], index, 0, 0, world)
    else:
        for index, group in enumerate(groups):
            shards += _flat(group, index, param, world, round_robin)
    return ShardMap(world, tuple(numels[name] for name in names), tuple(shards))


def _flat(group: Group, index: int, param: dict[str, int], world: int, round_robin: bool) -> list[Shard]:
    order = [entry for rank in range(world) for entry in group[rank::world]] if round_robin else list(group)
    multiple = FLAT_ALIGNMENT * world
    size = -(-sum(numel for _, numel in order) // multiple) * multiple // world
    own, offset = [], 0
    for name, numel in order:
        if name in param:
            own.append((numel, offset, param[name]))
        offset += numel
    if not own:
        return []
    sizes, offsets, params = zip(*own, strict=True)
    return partition_flat(sizes, offsets, params, index, size, world)
