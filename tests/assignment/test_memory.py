"""Bytes of state on every rank, and a cap on them. Arithmetic, no ranks."""

from dataclasses import replace

import pytest

from ds_kfac.assignment.assign import Assignment
from ds_kfac.assignment.costs import Work, factor_specs
from ds_kfac.curvature.factor import Side
from tests.assignment.test_assign import COSTS, INTERVALS, layers, place
from tests.models import linear_layer


def test_memory_is_factors_on_eigen_workers_and_bases_and_moments_on_workers():
    specs = [replace(linear_layer("l0", 5, 3), G=Side.diagonal(3))]
    factors = factor_specs(specs)
    work = Work(specs, factors, 4, None, COSTS, **INTERVALS, moments=2)
    found = Assignment(work, {"l0": (0, 2)}, {"l0/A": 2, "l0/G": 3}).memory
    bases_and_moments = 4 * (5 * 5 + 5) + 4 * 3 + 2 * 4 * 15 + 4  # and their counter
    assert found == (bases_and_moments, 0, bases_and_moments + 4 * 15 + 4, 4 * 3 + 4)


def test_a_step_needs_batch_sums_gradients_and_results_beside_the_state():
    specs = layers((7, 3))
    work = Work(specs, factor_specs(specs), 2, None, COSTS, **INTERVALS)
    roles = Assignment(work, {"l0": (0, 1)}, {"l0/A": 0, "l0/G": 1})
    beside = [peak - state for peak, state in zip(roles.peak, roles.memory, strict=True)]
    # a sum has its factor's bytes
    assert beside == [4 * 28 + 4 + 2 * 4 * 21, 4 * 6 + 4 + 2 * 4 * 21]


def test_a_shared_factor_takes_memory_once_a_rank():
    specs = layers((7, 3), (7, 3))
    factors = factor_specs(specs, [["l0", "l1"]])
    work = Work(specs, factors, 2, None, COSTS, **INTERVALS)
    A, G = 4 * (49 + 7), 4 * (9 + 3)
    packed_A, packed_G = 4 * 28 + 4, 4 * 6 + 4
    eigen_workers = {"l0/A": 0, "l0/G": 0, "l1/G": 0}
    together, apart = (
        Assignment(work, {"l0": (0,), "l1": (rank,)}, eigen_workers) for rank in range(2)
    )
    assert together.memory == (A + 2 * G + packed_A + 2 * packed_G, 0)
    assert apart.memory == (A + G + packed_A + 2 * packed_G, A + G)


@pytest.mark.parametrize("zero", [False, True], ids=["replicated", "zero"])
def test_a_cap_is_respected_down_to_the_smallest_assignment(zero):
    # four cost as much as one of 128 in seconds, not in bytes
    specs = layers(*[(128, 128)] * 4, *[(16, 16)] * 3)
    held = {spec.name: [spec.numel, 0] for spec in specs} if zero else None
    options = {"held": held, "load_tolerance": 9.0, "moments": 1}
    free = place(specs, 2, **options)
    cap = sum(free.peak) * 0.52
    capped = place(specs, 2, memory_cap=cap, **options)
    assert max(capped.peak) <= cap
    if zero:  # else it is balanced anyway
        assert max(free.peak) > cap


def test_bytes_are_balanced_when_heaviest_first_in_seconds_leads_to_a_dead_end():
    # 8 x 300 comes third in seconds, first in bytes
    specs = layers((8, 100), (100, 200), (200, 50), (8, 300))
    cap = 0.57 * sum(place(specs, 2, moments=1).peak)
    assert max(place(specs, 2, moments=1, memory_cap=cap).peak) <= cap


def test_a_cap_that_nothing_fits_says_how_much_is_needed_and_what_to_change():
    specs = layers((64, 64), (64, 64))
    needed = max(place(specs, 2).peak)
    assert max(place(specs, 2, memory_cap=needed).peak) == needed
    with pytest.raises(
        ValueError,
        match=rf"cap is {needed - 1} bytes.*needs {needed} .*factor\.dense_max or more than 2",
    ):
        place(specs, 2, memory_cap=needed - 1)
    with pytest.raises(ValueError, match="smaller gradient worker fraction than 1"):
        place(specs, 2, workers=2, memory_cap=needed - 1)


def test_the_ones_of_an_identity_are_counted_for_every_layer():
    specs = [replace(linear_layer("l0", 5, 3), G=Side.identity(3))]
    work = Work(specs, factor_specs(specs), 2, None, COSTS, **INTERVALS)
    assert Assignment(work, {"l0": (1,)}, {"l0/A": 0}).memory == (
        4 * 15 + 4,
        4 * (5 * 5 + 5) + 4 * 3,
    )
