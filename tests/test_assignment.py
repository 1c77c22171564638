"""Owners: where the gradient is, unless that overloads a rank. Plain arithmetic, no ranks."""

from ds_kfac.assignment import assign_owners, layer_cost
from ds_kfac.layers.base import LayerSpec
from tests.models import linear_layer


def layers(*shapes: tuple[int, int]) -> list[LayerSpec]:
    return [linear_layer(f"l{i}", a, g) for i, (a, g) in enumerate(shapes)]


def assign(specs, held, world, tolerance=0.1):
    return assign_owners(specs, held, world=world, refresh_interval=100, load_tolerance=tolerance)


def test_a_layer_stays_with_its_majority_holder():
    specs = layers((8, 8), (8, 8), (8, 8), (8, 8))
    held = {"l0": [64, 0], "l1": [40, 24], "l2": [20, 44], "l3": [0, 64]}
    assert assign(specs, held, 2).owners == {"l0": 0, "l1": 0, "l2": 1, "l3": 1}


def test_an_overloaded_rank_gives_to_the_least_loaded():
    specs = layers(*[(8, 8)] * 6)
    held = {spec.name: [64, 0, 0] for spec in specs}
    assignment = assign(specs, held, 3)
    assert sorted(assignment.owners.values()) == [0, 0, 1, 1, 2, 2]
    assert assignment.imbalance == 1.0


def test_replicated_gradients_are_balanced_heaviest_first():
    specs = layers((30, 30), (20, 20), (20, 20), (10, 10), (10, 10))
    held = {spec.name: [spec.numel] * 2 for spec in specs}
    assignment = assign(specs, held, 2)
    costs = {spec.name: layer_cost(spec, 100) for spec in specs}
    assert assignment.owners["l0"] != assignment.owners["l1"]
    for rank in (0, 1):
        assert sum(costs[n] for n, owner in assignment.owners.items() if owner == rank) == assignment.loads[rank]


def test_rounding_ties_of_zero3_chunks_do_not_pile_up_on_rank_0():
    specs = layers(*[(11, 11)] * 8)
    held = {spec.name: [31, 31, 31, 28] for spec in specs}
    counts = [list(assign(specs, held, 4).owners.values()).count(rank) for rank in range(4)]
    assert counts == [2, 2, 2, 2]


def test_no_rank_is_idle_when_there_are_enough_layers():
    specs = layers(*[(8, 8)] * 9)
    held = {spec.name: [64 if rank == 1 + i % 7 else 0 for rank in range(8)] for i, spec in enumerate(specs)}
    assignment = assign(specs, held, 8, tolerance=5.0)  # nothing is overloaded, rank 0 holds nothing
    assert set(assignment.owners.values()) == set(range(8))


def test_an_idle_rank_takes_from_one_that_has_two():
    specs = layers((100, 100), (8, 8), (8, 8), (8, 8))
    held = {"l0": [9, 0, 0], "l1": [0, 9, 0], "l2": [0, 9, 0], "l3": [0, 9, 0]}
    assert set(assign(specs, held, 3).owners.values()) == {0, 1, 2}


def test_more_ranks_than_layers():
    specs = layers((8, 8), (8, 8))
    assert len(set(assign(specs, {s.name: [16] * 4 for s in specs}, 4).owners.values())) == 2
