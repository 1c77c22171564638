"""What layers of one shape keep together is there once, and each layer has a slice of it."""

import weakref
from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis
from ds_kfac.update.groups import Group, Groups
from ds_kfac.update.rotation import Rotation
from ds_kfac.update.state import AdamMoments, LayerState
from tests.close import close, exact
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 3, 5
LAYERS = tuple(linear_layer(name, COLUMNS, ROWS) for name in "abc")
CPU = torch.device("cpu")


def state(seed: int, *, basis: bool = True) -> LayerState:
    found = LayerState.empty(LAYERS[seed], CPU, moments=AdamMoments)
    moments = AdamMoments(torch.randn(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS), torch.tensor(float(seed)))
    sides = random_basis(ROWS, COLUMNS, seed=seed)
    return replace(found, moments=moments, **({"A": sides.A, "G": sides.G} if basis else {}))


@pytest.fixture
def states() -> dict[str, LayerState]:
    torch.manual_seed(0)
    return {layer.name: state(index) for index, layer in enumerate(LAYERS)}


def test_states_become_slices_with_the_same_values(states):
    before, group = dict(states), Group(LAYERS)
    own = group.take(states)
    assert own == [states[name] for name in "abc"]
    for index, (name, now) in enumerate(states.items()):
        for mine, old in ((now.moments, before[name].moments), (now.A, before[name].A), (now.G, before[name].G)):
            exact(list(vars(mine).values()), list(vars(old).values()))
        assert now.moments.first_OI.data_ptr() == group.moments.first_OI[index].data_ptr()
        assert now.A.vectors[0].data_ptr() == group.rotation.A[0][index].data_ptr()
        x_OI = torch.randn(ROWS, COLUMNS)
        close(group.rotation.rotate(x_OI.expand(3, -1, -1))[index], before[name].basis.rotate(x_OI), sums=8)


def test_nothing_is_copied_again_until_something_is_another_one(states, monkeypatch):
    group, made, of = Group(LAYERS), [], Rotation.of
    group.take(states)
    moments, rotation = group.moments, group.rotation
    monkeypatch.setattr(Rotation, "of", lambda *args: made.append(old() is not None) or of(*args))
    group.take(states)
    states["b"] = replace(states["b"], terms=torch.tensor(2.0))
    group.take(states)
    assert group.moments is moments and group.rotation is rotation and not made
    old = weakref.ref(rotation)
    del rotation
    new = random_basis(ROWS, COLUMNS, seed=7)
    states["b"] = states["b"].rebased(A=new.A)
    own = group.take(states)
    assert made == [False], "what was turned with is freed before another one is made"
    assert group.moments is moments and own[1].moments.first_OI.data_ptr() == moments.first_OI[1].data_ptr()
    exact(group.rotation.A[0][1], new.A.vectors[0][0])
    states["c"] = state(2)
    group.take(states)
    assert group.moments is not moments
    exact(group.moments.first_OI[2], states["c"].moments.first_OI)


def test_what_a_skipped_step_drops_is_put_together_again(states):
    """States of before the step are what goes on."""
    group = Group(LAYERS)
    group.take(states)
    kept = dict(states)
    new = random_basis(ROWS, COLUMNS, seed=7)
    states["a"] = replace(states["a"], A=new.A, G=new.G)
    group.take(states)
    group.take(kept)
    exact(group.rotation.A[0][0], kept["a"].A.vectors[0][0])
    assert (group.rotation.A[0][0] - new.A.vectors[0][0]).norm() > 0.1


def test_a_layer_alone_keeps_its_own(states):
    before, group = dict(states), Group(LAYERS[:1])
    own = group.take(states)
    assert states == before and own[0].moments is group.moments and group.rotation.A is own[0].A.vectors
    rotation = group.rotation
    group.take(states)
    assert group.rotation is rotation


def test_moments_of_the_group_are_its_layers(states):
    group = Group(LAYERS)
    group.take(states)
    new = AdamMoments(*(torch.rand_like(part) for part in vars(group.moments).values()))
    group.keep(states, new)
    exact(states["c"].moments.second_OI, new.second_OI[2])
    assert group.moments is new and group.take(states)[2] is states["c"] and group.moments is new


def test_a_stack_that_lacks_a_basis_is_taken_layer_by_layer(states):
    groups = Groups([LAYERS[:2], LAYERS[2:]], HIGHEST)
    (both, alone) = groups.of(states)
    assert [group.names for group in (both, alone)] == [("a", "b"), ("c",)]
    both.take(states)
    gone = weakref.ref(both)
    del both
    found = list(groups.of({**states, "a": replace(state(0, basis=False), A=None)}))
    assert [group.names for group in found] == [("a",), ("b",), ("c",)] and found[2] is alone
    assert gone() is None
    assert found[0].take({**states, "a": state(0, basis=False)}) and found[0].rotation is None


def test_identity_sides_have_no_vectors(states):
    for name in states:
        states[name] = replace(states[name], G=Eigenbasis((), torch.ones(ROWS)))
    group = Group(LAYERS)
    own = group.take(states)
    assert group.rotation.G == () and all(one.G.vectors == () for one in own)
