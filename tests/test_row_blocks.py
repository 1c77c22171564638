"""Layers cut into blocks of rows: their sides, their shared A, and where their gradients lie."""

import pytest
import torch
from torch import nn

from ds_kfac.factor_spec import factor_specs
from ds_kfac.layers.row_blocks import first_blocks, row_blocks
from ds_kfac.scan import Choice, scan
from ds_kfac.side import Side
from ds_kfac.zero.regions import Region, held_by_layer, parameter_names, regional, regions
from ds_kfac.zero.shards import Shard, ShardMap
from tests.shard_maps import chunk_map, flat_map


def layers_of(max_outputs: int | None, **choice):
    model = nn.ModuleDict({"wide": nn.Linear(5, 13), "bare": nn.Linear(5, 9, bias=False), "small": nn.Linear(9, 3)})
    return scan(model, Choice(max_outputs=max_outputs, **choice)).layers


def test_blocks_are_as_even_as_possible_and_share_the_input():
    layers = layers_of(6)
    assert [layer.name for layer in layers] == [
        "wide.rows_0_5", "wide.rows_5_10", "wide.rows_10_13", "bare.rows_0_5", "bare.rows_5_9", "small",
    ]  # fmt: skip
    assert [layer.G for layer in layers[:3]] == [Side.dense(5), Side.dense(5), Side.dense(3)]
    assert [layer.extents for layer in layers[:2]] == [((0, 25), (0, 5)), ((25, 50), (5, 10))]
    assert layers[3].extents == ((0, 25),) and layers[5].extents == (None, None)
    assert first_blocks(layers) == {
        **dict.fromkeys(["wide.rows_0_5", "wide.rows_5_10", "wide.rows_10_13"], "wide.rows_0_5"),
        **dict.fromkeys(["bare.rows_0_5", "bare.rows_5_9"], "bare.rows_0_5"),
    }
    factors = {factor.key: factor.layers for factor in factor_specs(layers)}
    assert factors["wide.rows_0_5/A"] == ("wide.rows_0_5", "wide.rows_5_10", "wide.rows_10_13")
    assert sum(key.endswith("/A") for key in factors) == 3 and sum(key.endswith("/G") for key in factors) == 6


def test_blocks_of_found_groups_follow_the_first_layer():
    same = nn.ModuleDict({"q": nn.Linear(5, 8), "k": nn.Linear(5, 8)})
    layers = scan(same, Choice(max_outputs=4)).layers
    factors = {f.key: f.layers for f in factor_specs(layers, [("q.rows_0_4", "k.rows_0_4")])}
    assert factors["q.rows_0_4/A"] == tuple(layer.name for layer in layers)
    assert not any(key.startswith("k") and key.endswith("/A") for key in factors)


@pytest.mark.parametrize(
    "side, expected",
    [
        (Side.dense(12), [Side.dense(4)] * 3),
        (Side.diagonal(12), [Side.diagonal(4)] * 3),
        (Side.identity(12), [Side.identity(4)] * 3),
        (Side(12, 3), [Side(6, 3), Side(6, 3)]),
    ],
)
def test_blocks_keep_the_structure_of_G(side, expected):
    from dataclasses import replace

    layer = layers_of(None)[0]
    layer = replace(layer, G=side, uses=(replace(layer.uses[0], G=side),))
    assert [block.G for block in row_blocks(layer, 4)] == expected
    assert [block.uses[0].G for block in row_blocks(layer, 4)] == expected


def test_types_whose_rows_are_scattered_stay_whole():
    model = nn.ModuleDict({"embed": nn.Embedding(50, 12), "out": nn.Linear(12, 30)})
    layers = scan(model, Choice(types=("Linear", "Embedding"), max_outputs=6)).layers
    assert [layer.name for layer in layers][:2] == ["embed", "out.rows_0_6"]


def test_what_is_left_alone_is_listed_once():
    model = nn.ModuleDict({"wide": nn.Linear(5, 13)})
    model["wide"].bias.requires_grad_(False)
    found = scan(model, Choice(max_outputs=6))
    assert len(found.layers) == 3 and [left.name for left in found.skipped] == ["wide.bias"]


NUMELS = (65, 13, 45, 27, 3)  # of layers_of: wide, its bias, bare, small, its bias


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [flat_map, chunk_map])
@pytest.mark.parametrize("max_outputs", [None, 1, 4, 6])
def test_regional_shards_are_the_same_elements_in_the_same_places(world, make, max_outputs):
    shards, layers = make(NUMELS, world), layers_of(max_outputs)
    assert len(parameter_names(layers)) == len(NUMELS)
    found = regions(layers, NUMELS)
    cut = regional(shards, found)

    def places(shards: ShardMap, base) -> dict:
        return {
            (base(shard)[0], base(shard)[1] + i): (shard.rank, shard.group, shard.offset + i)
            for shard in shards.shards
            for i in range(shard.numel)
        }

    whole = places(shards, lambda shard: (shard.param, shard.start))
    pieces = places(cut, lambda shard: (found[shard.param].param, found[shard.param].start + shard.start))
    assert whole == pieces
    held = held_by_layer(layers, shards)
    assert sum(map(sum, held.values())) == sum(NUMELS) and set(held) == {layer.name for layer in layers}
    if max_outputs is None:
        assert cut == shards


def test_regions_that_miss_elements_are_refused():
    shards = ShardMap(1, (4,), (Shard(0, 0, 4, 0, 0, 0),))
    with pytest.raises(ValueError, match="do not cover"):
        regional(shards, [Region("x", "w", 0, 0, 3)])


def test_statistics_of_a_block_are_those_of_its_outputs():
    from ds_kfac.calls import BatchSum, UseSums
    from ds_kfac.capture import Capture

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 13))
    whole, blocks = scan(model, Choice()).layers, scan(model, Choice(max_outputs=6)).layers
    x, found = torch.randn(4, 5), []
    for layers in (whole, blocks):
        sums = {
            layer.name: [UseSums(*(BatchSum(torch.zeros(side.numel), torch.zeros(())) for side in (layer.A, layer.G)))]
            for layer in layers
        }
        capture = Capture(model, layers, lambda sums=sums: sums, lambda: 1.0)
        capture.active = True
        model(x).square().mean().backward()
        found.append([sums[layer.name][0] for layer in layers])
        capture.remove()
    (G,) = whole[0].G.blocks(found[0][0].G.sum_P)[0]
    for layer, uses in zip(blocks, found[1], strict=True):
        rows = slice(*layer.rows)
        torch.testing.assert_close(layer.G.blocks(uses.G.sum_P)[0][0], G[rows, rows])
        torch.testing.assert_close(uses.A.sum_P, found[0][0].A.sum_P)
