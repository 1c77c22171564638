"""Shard maps and relayout plans: pure values, so every world size fits in one process."""

from functools import partial

import pytest

from ds_kfac.assignment.assign import column
from ds_kfac.comm.message import Move, RelayoutPlan
from ds_kfac.zero.shards import Shard, ShardMap, plan_gather, plan_scatter
from tests.zero import shard_maps

NUMELS = (1, 63, 257, 5, 128)


def replicated_map(world: int) -> ShardMap:
    shards = [
        Shard(i, 0, numel, rank, 0, 0) for i, numel in enumerate(NUMELS) for rank in range(world)
    ]
    return ShardMap(world, NUMELS, tuple(shards))


def owners(world: int) -> dict[int, list[int]]:
    return {i: [(3 * i + 1) % world] for i in range(len(NUMELS))}


flat_map, chunk_map = partial(shard_maps.flat_map, NUMELS), partial(shard_maps.chunk_map, NUMELS)
MAPS = [flat_map, chunk_map, replicated_map]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("make", MAPS)
def test_gather_brings_every_element_to_its_owner_once(make, world):
    shards, owner = make(world), owners(world)
    for param, numel in enumerate(NUMELS):
        arrived = [
            (s.start, s.start + s.numel) for s in shards.on(*owner[param]) if s.param == param
        ]
        arrived += [
            (m.start, m.start + m.numel)
            for m in plan_gather(shards, owner).moves
            if m.param == param
        ]
        covered = sorted(element for start, stop in arrived for element in range(start, stop))
        assert covered == list(range(numel))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("make", MAPS)
def test_scatter_reaches_every_shard_that_is_not_on_the_owner(make, world):
    shards, owner = make(world), owners(world)
    moves = plan_scatter(shards, owner).moves
    assert all([move.source] == owner[move.param] for move in moves)
    reached = {(m.param, m.start, m.numel, m.target) for m in moves}
    assert reached == {
        (s.param, s.start, s.numel, s.rank) for s in shards.shards if [s.rank] != owner[s.param]
    }


@pytest.mark.parametrize(
    ("world", "count"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (12, 4)]
)
def test_several_workers_serve_consecutive_ranks_each(world, count):
    """The KAISA grid: every rank that is no worker gets each layer from the one worker in its
    row."""
    width, shards = world // count, replicated_map(world)
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


def test_a_replicated_gradient_is_not_gathered():
    assert plan_gather(replicated_map(4), owners(4)).moves == ()


def test_sender_and_receiver_agree_on_the_order():
    plan = RelayoutPlan(2, (Move(1, 4, 2, 0, 1), Move(0, 9, 3, 0, 1), Move(0, 2, 1, 0, 1)))
    assert [(m.param, m.start) for m in plan.moved[0, 1]] == [(0, 2), (0, 9), (1, 4)]
    assert sum(plan.sizes[0, 1]) == plan.total_numel == 6 and (1, 0) not in plan.sizes


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
