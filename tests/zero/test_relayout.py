"""Shard maps and relayout plans: pure values, so every world size fits in one process."""

import pytest
from torch import nn

from ds_kfac.assignment.assign import column
from ds_kfac.model.scan import scan
from ds_kfac.zero.shards import (
    Shard,
    ShardMap,
    held_by_layer,
    of_layers,
    parameter_names,
    plan_gather,
    plan_scatter,
)
from tests.zero.shard_maps import chunk_map, flat_map

NUMELS = (1, 63, 257, 5, 128)


def replicated_map(numels: tuple[int, ...], world: int) -> ShardMap:
    shards = [
        Shard(i, 0, numel, rank, 0, 0) for i, numel in enumerate(numels) for rank in range(world)
    ]
    return ShardMap(world, numels, tuple(shards))


def owners(world: int) -> dict[int, list[int]]:
    return {i: [(3 * i + 1) % world] for i in range(len(NUMELS))}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("make", [flat_map, chunk_map, replicated_map])
def test_every_element_goes_to_its_owner_once_and_back_to_every_shard(make, world):
    shards, owner = make(NUMELS, world), owners(world)
    gathered = plan_gather(shards, owner).moves
    for param, numel in enumerate(NUMELS):
        parts = [*shards.on(*owner[param]), *gathered]
        arrived = [(part.start, part.start + part.numel) for part in parts if part.param == param]
        covered = sorted(element for start, stop in arrived for element in range(start, stop))
        assert covered == list(range(numel))
    assert not gathered or make is not replicated_map, "a replicated gradient is there already"
    scattered = plan_scatter(shards, owner).moves
    assert all([move.source] == owner[move.param] for move in scattered)
    reached = {(m.param, m.start, m.numel, m.target) for m in scattered}
    assert reached == {
        (s.param, s.start, s.numel, s.rank) for s in shards.shards if [s.rank] != owner[s.param]
    }


@pytest.mark.parametrize(("world", "count"), [(1, 1), (4, 2), (4, 4), (12, 4)])
def test_several_workers_serve_consecutive_ranks_each(world, count):
    """The KAISA grid: every rank that is no worker gets each layer from the one worker in its
    row."""
    width, shards = world // count, replicated_map(NUMELS, world)
    workers = {
        param: column(param % width, world=world, workers=count) for param in range(len(NUMELS))
    }
    moves = plan_scatter(shards, workers).moves
    assert {(m.param, m.target) for m in moves} == {
        (param, rank) for param in workers for rank in range(world) if rank not in workers[param]
    }
    assert len(moves) == len({(m.param, m.target) for m in moves})
    for move in moves:
        assert move.source in workers[move.param] and move.source // width == move.target // width
        assert (move.start, move.numel) == (0, NUMELS[move.param])


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard(0, 0, 3, 0, 0, 0), Shard(0, 4, 1, 1, 0, 0)], "gap or overlap at element 3"),
        ([Shard(0, 0, 3, 0, 0, 0), Shard(0, 2, 3, 1, 0, 0)], "gap or overlap at element 2"),
        ([Shard(0, 0, 3, 0, 0, 0)], "cover only its first 3 of 5"),
    ],
)
def test_a_map_that_does_not_cover_is_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        ShardMap(2, (5,), tuple(shards))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [flat_map, chunk_map])
def test_a_layer_s_elements_are_those_of_its_parameters(world, make):
    bare = nn.Linear(5, 9, bias=False)
    model = nn.ModuleDict({"wide": nn.Linear(5, 13), "bare": bare, "small": nn.Linear(9, 3)})
    layers, shards = scan(model).layers, make((65, 13, 45, 27, 3), world)
    names = parameter_names(layers)
    assert names == ["wide.weight", "wide.bias", "bare.weight", "small.weight", "small.bias"]
    params, held = of_layers(layers), held_by_layer(layers, shards)
    for layer in layers:
        assert tuple(names[param] for param in params[layer.name]) == layer.parameters
        assert sum(held[layer.name]) == layer.numel
    assert [sum(own) for own in zip(*held.values(), strict=True)] == [
        sum(shard.numel for shard in shards.on(rank)) for rank in range(world)
    ]
