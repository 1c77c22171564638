"""The preconditioned parameters, numbered: which are which layer's, and what of them lies on which rank."""

from collections.abc import Mapping, Sequence

from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.zero.shards import ShardMap


def parameter_names(layers: Sequence[LayerSpec]) -> list[str]:
    """Names of the preconditioned parameters, each once, in the order of :attr:`Shard.param`."""
    return [name for layer in layers for name in layer.parameters]


def of_layers(layers: Sequence[LayerSpec]) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> indices of its parameters in :func:`parameter_names`."""
    found, start = {}, 0
    for layer in layers:
        found[layer.name] = tuple(range(start, start + len(layer.parameters)))
        start += len(layer.parameters)
    return found


def held_by_layer(layers: Sequence[LayerSpec], shards: ShardMap) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> gradient elements on each rank."""
    return {name: shards.held(params) for name, params in of_layers(layers).items()}
