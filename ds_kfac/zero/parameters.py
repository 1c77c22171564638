"""The preconditioned parameters, numbered: which are which layer's, and what of them lies on which rank."""

from collections.abc import Mapping, Sequence

from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.zero.shards import Piece, ShardMap


def parameter_names(layers: Sequence[LayerSpec]) -> list[str]:
    """Names of the preconditioned parameters, each once."""
    return list(dict.fromkeys(name for layer in layers for name in layer.parameters))


def pieces_of(layers: Sequence[LayerSpec]) -> tuple[Piece, ...]:
    """What the layers have of :func:`parameter_names`, in the order of :attr:`Shard.param`: layer after layer."""
    place = {name: index for index, name in enumerate(parameter_names(layers))}
    return tuple(Piece(place[name], *layer.part) for layer in layers for name in layer.parameters)


def of_layers(layers: Sequence[LayerSpec]) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> indices in :func:`pieces_of`."""
    found, start = {}, 0
    for layer in layers:
        found[layer.name] = tuple(range(start, start + len(layer.parameters)))
        start += len(layer.parameters)
    return found


def held_by_layer(layers: Sequence[LayerSpec], shards: ShardMap) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> gradient elements on each rank. ``shards``: of :func:`pieces_of`."""
    return {name: shards.held(params) for name, params in of_layers(layers).items()}
