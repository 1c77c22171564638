"""A new eigenbasis of one side, or of both: what the moments stand for stays."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.update.state import AdamMoments, LayerState
from tests.close import close
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 3, 5


@pytest.mark.parametrize("sides", ["A", "G", "AG"])
def test_the_first_moment_is_turned_with_the_sides_that_are_new(sides):
    old, new = random_basis(ROWS, COLUMNS, seed=1), random_basis(ROWS, COLUMNS, seed=2)
    state = LayerState.empty(linear_layer("layer", COLUMNS, ROWS), torch.device("cpu"), moments=AdamMoments)
    state = state.rebased(A=old.A, G=old.G)
    first, second = torch.randn(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)
    state = replace(state, moments=replace(state.moments, first_OI=first.clone(), second_OI=second.clone()))
    after = state.rebased(**{side: getattr(new, side) for side in sides})
    assert after.A is (new.A if "A" in sides else old.A) and after.G is (new.G if "G" in sides else old.G)
    assert after.moments is state.moments, "in place"
    close(after.basis.restore(after.moments.first_OI), old.restore(first), sums=4 * (ROWS + COLUMNS))
    assert (after.moments.first_OI - first).norm() > 0.1 * first.norm(), "it was turned"
    assert torch.equal(after.moments.second_OI, second)


def test_moments_from_before_the_first_basis_go_into_it_and_on():
    """The second side's comes later: until then there is no basis."""
    bases = [random_basis(ROWS, COLUMNS, seed=seed) for seed in range(3)]
    state = LayerState.empty(linear_layer("layer", COLUMNS, ROWS), torch.device("cpu"), moments=AdamMoments)
    momentum = torch.randn(ROWS, COLUMNS)
    state = replace(state, moments=replace(state.moments, first_OI=momentum.clone()))
    state = state.rebased(A=bases[0].A)
    assert state.basis is None and torch.equal(state.moments.first_OI, momentum)
    for basis in bases:
        state = state.rebased(A=basis.A, G=basis.G)
    close(bases[-1].restore(state.moments.first_OI), momentum, sums=8 * (ROWS + COLUMNS))


def test_both_moments_go_into_the_first_basis():
    first, second = torch.randn(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)
    moments = AdamMoments(first.clone(), second.clone(), torch.tensor(4.0))
    empty = LayerState.empty(linear_layer("layer", COLUMNS, ROWS), torch.device("cpu"), moments=AdamMoments)
    assert not empty.moments_begun and replace(empty, moments=moments).moments_begun
    basis = random_basis(ROWS, COLUMNS, seed=1)
    after = replace(empty, moments=moments).rebased(A=basis.A).rebased(G=basis.G)
    Q_G, Q_A = basis.G.vectors[0][0], basis.A.vectors[0][0]
    close(after.moments.first_OI, Q_G.T @ first @ Q_A, sums=4 * (ROWS + COLUMNS))
    close(after.moments.second_OI, Q_G.T.square() @ second @ Q_A.square(), sums=4 * (ROWS + COLUMNS))
    assert after.moments is moments, "in place"
