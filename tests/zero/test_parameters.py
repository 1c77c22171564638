"""Which parameters are which layer's, and where their gradients lie."""

import pytest
from torch import nn

from ds_kfac.model.scan import scan
from ds_kfac.zero.shards import held_by_layer, of_layers, parameter_names
from tests.zero.shard_maps import chunk_map, flat_map

MODEL = nn.ModuleDict(
    {"wide": nn.Linear(5, 13), "bare": nn.Linear(5, 9, bias=False), "small": nn.Linear(9, 3)}
)
NUMELS = (65, 13, 45, 27, 3)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [flat_map, chunk_map])
def test_a_layer_s_elements_are_those_of_its_parameters(world, make):
    layers, shards = scan(MODEL).layers, make(NUMELS, world)
    names = parameter_names(layers)
    assert names == ["wide.weight", "wide.bias", "bare.weight", "small.weight", "small.bias"]
    found = of_layers(layers)
    assert [tuple(names[param] for param in found[layer.name]) for layer in layers] == [
        x.parameters for x in layers
    ]
    held = held_by_layer(layers, shards)
    assert [sum(held[layer.name]) for layer in layers] == [layer.numel for layer in layers]
    assert [sum(own) for own in zip(*held.values(), strict=True)] == [
        sum(shard.numel for shard in shards.on(rank)) for rank in range(world)
    ]
