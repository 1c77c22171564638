"""Which elements of which parameter are which layer's: whole parameters, or blocks of a weight's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac.layers.base import LayerSpec
from ds_kfac.zero.shards import Shard, ShardMap


def parameter_names(layers: Sequence[LayerSpec]) -> list[str]:
    """Names of the preconditioned parameters, each once, in the order of :attr:`Shard.param`."""
    return list(dict.fromkeys(name for layer in layers for name in layer.parameters))


@dataclass(frozen=True)
class Region:
    """Elements ``start .. stop`` of a flattened parameter, which belong to one layer.

    Attributes:
        param: index of the parameter, in the order of :func:`parameter_names`.
    """

    layer: str
    parameter: str
    param: int
    start: int
    stop: int


def regions(layers: Sequence[LayerSpec], numels: Sequence[int]) -> tuple[Region, ...]:
    """Of all layers, in their order.

    Args:
        numels: of the parameters, in the order of :func:`parameter_names`.
    """
    param = {name: index for index, name in enumerate(parameter_names(layers))}
    return tuple(
        Region(layer.name, name, param[name], *(extent or (0, numels[param[name]])))
        for layer in layers
        for name, extent in zip(layer.parameters, layer.extents, strict=True)
    )


def regional(shards: ShardMap, found: Sequence[Region]) -> ShardMap:
    """The shards cut at the regions' ends; a shard's ``param`` is then the index of its region, where it starts at 0.

    Raises:
        ValueError: the regions do not cover the parameters.
    """
    if sum(region.stop - region.start for region in found) != sum(shards.numels):
        raise ValueError("regions: they do not cover the parameters of the layers")
    cut = []
    for index, region in enumerate(found):
        for shard in shards.of_param[region.param]:
            start, stop = max(shard.start, region.start), min(shard.start + shard.numel, region.stop)
            if start < stop:
                offset = shard.offset + start - shard.start
                cut.append(Shard(index, start - region.start, stop - start, shard.rank, shard.group, offset))
    return ShardMap(shards.world, tuple(region.stop - region.start for region in found), tuple(cut))


def held_by_layer(layers: Sequence[LayerSpec], shards: ShardMap) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> gradient elements on each rank."""
    found = regions(layers, shards.numels)
    cut, own = regional(shards, found), dict[str, list[int]]()
    for index, region in enumerate(found):
        own.setdefault(region.layer, []).append(index)
    return {layer.name: cut.held(own[layer.name]) for layer in layers}
