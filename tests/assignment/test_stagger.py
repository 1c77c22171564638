"""Offsets: the slowest step is as short as it can be, captures are spread, what belongs together
stays together."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from ds_kfac.assignment.assign import assign, refresh_offsets
from ds_kfac.assignment.costs import BUILTIN, Work, factor_specs
from tests.close import close
from tests.layer_tables import TABLES
from tests.models import linear_layer

COSTS = BUILTIN["cpu"]


def of_A(count: int, width: int) -> tuple:
    """So many factors, alike."""
    layers = [linear_layer(f"l{i}", width, 1) for i in range(count)]
    return tuple(factor for factor in factor_specs(layers) if factor.is_A)


times = partial(Work, [], [], 1, None)


@pytest.mark.parametrize("world", [1, 4, 64])
@pytest.mark.parametrize("table", TABLES)
def test_no_step_of_a_large_model_does_more_than_its_largest_factor_or_its_share(table, world):
    layers, factors = TABLES[table]()
    intervals = {"update_interval": 10, "refresh_interval": 100}
    assignment = assign(Work(layers, factors, world, None, COSTS, **intervals), 1)
    offsets, worst = refresh_offsets(factors, assignment.owners, times(COSTS, 10, 100))
    seconds = {factor.key: COSTS.decompose(factor.side) for factor in factors}
    shares, busy, captured = Counter(), Counter(), [0] * 10
    for key, rank in assignment.owners.items():
        shares[rank] += seconds[key] / 100
        busy[offsets[key], rank] += seconds[key]
    assert worst <= 1.2 * max(*seconds.values(), *shares.values())
    close(worst, max(busy.values()))
    for factor in factors:
        captured[offsets[factor.key] % 10] += factor.side.dim**2
    largest = max(factor.side.dim**2 for factor in factors)
    assert max(captured) <= max(1.1 * sum(captured) / 10, sum(captured) / 10 + largest)


@pytest.mark.parametrize(
    ("update", "refresh", "last"), [(3, 10, 9), (10, 4, 4), (1, 1, 1), (5, 5, 5)]
)
def test_offsets_stay_under_the_largest_multiple_of_the_update_interval(update, refresh, last):
    factors = of_A(40, 100)
    home = {factor.key: 0 for factor in factors}
    offsets, _ = refresh_offsets(factors, home, times(COSTS, update, refresh))
    assert set(offsets.values()) == set(range(last))


def test_ranks_that_share_cores_are_not_all_busy_at_once():
    factors = of_A(8, 500)
    owners = {factor.key: index % 4 for index, factor in enumerate(factors)}
    shared = replace(COSTS, node_size=4, node_cores=2)
    seconds = COSTS.decompose(factors[0].side)
    found = [refresh_offsets(factors, owners, times(own, 1, 4)) for own in (COSTS, shared)]
    close([worst for _, worst in found], [seconds, seconds])
    at_once = [[*offsets.values()].count(step) for offsets, _ in found for step in range(4)]
    assert max(at_once[:4]) == 4 and max(at_once[4:]) == 2, at_once


@pytest.mark.parametrize("alone", [False, True])
def test_on_a_gpu_all_captures_are_in_the_same_steps_and_refreshes_at_some_of_them(alone):
    """A step with any capture costs the host more than its captures cost the device."""
    costs = replace(COSTS, gpu=True)
    factors = of_A(12, 200)
    home = {factor.key: index % 2 for index, factor in enumerate(factors)}
    offsets, worst = refresh_offsets(factors, home, times(costs, 10, 43), alone=alone)
    assert Counter(offsets.values()) == {0: 4, 10: 4, 20: 2, 30: 2}
    close(worst, 2 * costs.decompose(factors[0].side))
    # an interval of one update has one step for them all, so they are spread over its steps as
    # elsewhere
    offsets, _ = refresh_offsets(factors, home, times(costs, 10, 10), alone=alone)
    assert len(set(offsets.values())) == (6 if alone else 10)
