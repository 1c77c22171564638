"""What layers of one shape keep together is there once, and each layer has a slice of it."""

import weakref
from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import Side
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.rotation import Rotation, repeated
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


def load(group: LayerGroup, states: dict[str, LayerState]) -> None:
    group.load(states, fresh=group.names)


def test_states_become_slices_with_the_same_values(states):
    before, group = dict(states), LayerGroup(LAYERS)
    load(group, states)
    for index, (name, now) in enumerate(states.items()):
        for mine, old in ((now.moments, before[name].moments), (now.A, before[name].A), (now.G, before[name].G)):
            exact(list(vars(mine).values()), list(vars(old).values()))
        assert now.moments.first_OI.data_ptr() == group.moments.first_OI[index].data_ptr()
        assert now.A.vectors[0].data_ptr() == group.rotation.A[0][index].data_ptr()
        x_OI = torch.randn(ROWS, COLUMNS)
        close(group.rotation.rotate(x_OI.expand(3, -1, -1))[index], before[name].basis.rotate(x_OI), sums=8)


def test_nothing_is_copied_again_until_something_is_another_one(states, monkeypatch):
    group, made, of = LayerGroup(LAYERS), [], Rotation.of
    load(group, states)
    moments, rotation = group.moments, group.rotation
    monkeypatch.setattr(Rotation, "of", lambda *args, **more: made.append(old() is not None) or of(*args, **more))
    load(group, states)
    states["b"] = replace(states["b"], terms=torch.tensor(2.0))
    load(group, states)
    assert group.moments is moments and group.rotation is rotation and not made
    old = weakref.ref(rotation)
    del rotation
    new = random_basis(ROWS, COLUMNS, seed=7)
    states["b"] = states["b"].rebased(A=new.A)
    load(group, states)
    assert made == [False], "what was turned with is freed before another one is made"
    assert group.moments is moments and states["b"].moments.first_OI.data_ptr() == moments.first_OI[1].data_ptr()
    exact(group.rotation.A[0][1], new.A.vectors[0][0])
    states["c"] = state(2)
    load(group, states)
    assert group.moments is not moments
    exact(group.moments.first_OI[2], states["c"].moments.first_OI)


def test_what_a_skipped_step_drops_is_put_together_again(states):
    """States of before the step are what goes on."""
    group = LayerGroup(LAYERS)
    load(group, states)
    kept = dict(states)
    new = random_basis(ROWS, COLUMNS, seed=7)
    states["a"] = replace(states["a"], A=new.A, G=new.G)
    load(group, states)
    load(group, kept)
    exact(group.rotation.A[0][0], kept["a"].A.vectors[0][0])
    assert (group.rotation.A[0][0] - new.A.vectors[0][0]).norm() > 0.1


@pytest.mark.parametrize("stays", [False, True])
def test_new_eigenbases_take_the_places_of_old_ones_once_their_step_was_applied(states, stays):
    group = LayerGroup(LAYERS)
    group.stays = stays
    group.load(states, fresh=group.names)
    applied, home = dict(states), group.rotation
    old, new = home.A[0].clone(), random_basis(ROWS, COLUMNS, seed=7)
    states["b"] = replace(states["b"], A=new.A)
    group.load(states, fresh={"b"})
    assert group.at_home is not stays and group.rotation is not home
    exact(group.rotation.A[0][1], new.A.vectors[0][0])
    exact(home.A[0], old)
    if not stays:
        return
    skipped = dict(applied)
    group.load(skipped, fresh=())
    assert group.at_home and group.rotation is home
    exact(home.A[0], old)
    group.load(states, fresh=())
    assert group.at_home and group.rotation is home
    exact(home.A[0][1], new.A.vectors[0][0])
    assert states["b"].A.vectors[0].data_ptr() == home.A[0][1].data_ptr()


def test_a_layer_alone_is_a_group_of_views_of_its_own(states):
    before, group = dict(states), LayerGroup(LAYERS[:1])
    load(group, states)
    state = states["a"]
    assert group.rotation.A is state.A.vectors is before["a"].A.vectors
    assert group.moments.first_OI.shape == (1, ROWS, COLUMNS) and state.moments.first_OI.shape == (ROWS, COLUMNS)
    for part, old in zip(vars(state.moments).values(), vars(before["a"].moments).values(), strict=True):
        assert part.data_ptr() == old.data_ptr() and part.shape == old.shape
    moments, rotation = group.moments, group.rotation
    load(group, states)
    assert group.moments is moments and group.rotation is rotation


def test_a_layer_in_groups_has_a_matrix_for_each():
    layer = replace(LAYERS[0], groups=2, G=Side(2 * ROWS, ROWS), A=Side(2 * COLUMNS, COLUMNS))
    moments = AdamMoments(torch.randn(2, ROWS, COLUMNS), torch.rand(2, ROWS, COLUMNS), torch.tensor([1.0, 2.0]))
    states = {"a": replace(LayerState.empty(LAYERS[0], CPU), moments=moments)}
    group = LayerGroup([layer])
    load(group, states)
    state = states["a"]
    assert (group.n, group.maps) == (2, 2) and group.rotation is None
    exact(list(vars(group.moments).values()), list(vars(moments).values()))
    exact(list(vars(state.moments).values()), list(vars(moments).values()))
    x = torch.randn(2, ROWS, COLUMNS)
    exact(group.by_layer(group.matrices([x]))[0], x)
    exact(repeated(torch.tensor([3.0, 4.0]), 2), torch.tensor([3.0, 3.0, 4.0, 4.0]))
    assert group.any_map(torch.tensor([False, True])).tolist() == [True]


def test_moments_of_the_group_are_its_layers(states):
    group = LayerGroup(LAYERS)
    load(group, states)
    own, moments = states["c"], group.moments
    moments.second_OI.copy_(torch.rand_like(moments.second_OI))
    exact(own.moments.second_OI, moments.second_OI[2])
    load(group, states)
    assert states["c"] is own and group.moments is moments


def test_a_layer_that_has_no_basis_yet_is_rotated_by_the_identity(states):
    states["b"] = state(1, basis=False)
    group = LayerGroup(LAYERS)
    load(group, states)
    layers = list(states.values())
    assert [one.basis is None for one in layers] == [False, True, False] and states["b"].A is None
    x = torch.randn(3, ROWS, COLUMNS)
    exact(group.rotation.rotate(x)[1], x[1])
    exact(group.rotation.values_A[1], torch.ones(COLUMNS))
    close(group.rotation.rotate(x)[2], layers[2].basis.rotate(x[2]), sums=8)
    rotation = group.rotation
    load(group, states)
    assert group.rotation is rotation
    new = random_basis(ROWS, COLUMNS, seed=7)
    states["b"] = states["b"].rebased(A=new.A, G=new.G)
    load(group, states)
    close(group.rotation.rotate(x)[1], new.rotate(x[1]), sums=8)
    without = {name: state(index, basis=False) for index, name in enumerate("abc")}
    load(group, without)
    assert group.rotation is None


def test_identity_sides_have_no_vectors(states):
    for name in states:
        states[name] = replace(states[name], G=Eigenbasis((), torch.ones(ROWS)))
    group = LayerGroup(LAYERS)
    load(group, states)
    assert group.rotation.G == () and all(one.G.vectors == () for one in states.values())


@pytest.mark.parametrize("without", ["", "b"])
def test_a_new_basis_takes_the_old_ones_place_also_beside_a_layer_that_has_none(states, without):
    """Whatever was derived from eigenvalues follows, and a basis of another form makes new places."""
    if without:
        states[without] = state("abc".index(without), basis=False)
    group = LayerGroup(LAYERS)
    load(group, states)
    rotation = group.rotation
    whitening, place = rotation.whitening(0.25), states["a"].A.vectors[0].data_ptr()
    new = random_basis(ROWS, COLUMNS, seed=9)
    states["a"] = replace(states["a"], A=new.A, G=new.G)
    group.load(states, fresh=())
    assert group.rotation is rotation and states["a"].A.vectors[0].data_ptr() == place
    exact(rotation.A[0][0], new.A.vectors[0][0]), exact(rotation.G[0][0], new.G.vectors[0][0])
    if without:
        exact(rotation.A[0][1], torch.eye(COLUMNS))
    fresh = LayerGroup(LAYERS)
    load(fresh, dict(states))
    assert rotation.whitening(0.25) is whitening
    exact(whitening, fresh.rotation.whitening(0.25))
    states["a"] = replace(states["a"], G=Eigenbasis((), torch.ones(ROWS)))
    if not without:
        states |= {name: replace(states[name], G=Eigenbasis((), torch.ones(ROWS))) for name in "bc"}
        group.load(states, fresh=())
        assert group.rotation is not rotation and not group.rotation.G
