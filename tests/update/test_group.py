"""A group owns what is kept of its layers: every tensor is there once, stays where it is, and
changes in place."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.factor import Side
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.rotation import repeated
from ds_kfac.update.state import AdamMoments, CorrectedEigenvalues, LayerState
from tests.close import close, exact
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 3, 5
LAYERS = tuple(linear_layer(name, COLUMNS, ROWS) for name in "abc")
IN_GROUPS = replace(LAYERS[0], groups=2, G=Side(2 * ROWS, ROWS), A=Side(2 * COLUMNS, COLUMNS))
SIZES = pytest.mark.parametrize("count", [1, 3])
TURNED = 4 * (ROWS + COLUMNS)


def basis(seed: int) -> LayerBasis:
    return random_basis(ROWS, COLUMNS, seed=seed)


def begun(count: int = 3, **options) -> LayerGroup:
    """With random moments, in each layer's own coordinates."""
    group = LayerGroup(LAYERS[:count], **{"moments": AdamMoments, **options})
    generator = torch.Generator().manual_seed(0)
    for part in vars(group.moments).values():
        part.copy_(torch.rand(part.shape, generator=generator) + 0.5)
    return group


def based(count: int = 3, **options) -> LayerGroup:
    """:func:`begun`, with eigenbases of every layer."""
    group = begun(count, **options)
    for index in range(count):
        group.rebase(index, A=basis(index).A, G=basis(index).G)
    return group


def tensors(state: LayerState) -> list[torch.Tensor]:
    sides = [
        x for side in (state.A, state.G) if side is not None for x in (*side.vectors, side.values)
    ]
    return [state.terms, *sides, *vars(state.moments).values()]


def copied(state: LayerState) -> LayerState:
    A, G = (
        x and Eigenbasis(tuple(v.clone() for v in x.vectors), x.values.clone())
        for x in (state.A, state.G)
    )
    return LayerState(
        state.terms.clone(),
        state.method,
        A,
        G,
        AdamMoments(*(x.clone() for x in vars(state.moments).values())),
    )


def addresses(group: LayerGroup) -> list[int]:
    turn, moments = group.rotation, vars(group.moments).values()
    return [
        x.data_ptr()
        for x in (group.terms, *turn.G, *turn.A, turn.values_G, turn.values_A, *moments)
    ]


@SIZES
def test_a_layers_state_is_a_view_that_sees_what_a_step_changes(count):
    group, last = based(count), count - 1
    state = group.state(last)
    group.terms.fill_(7.0)
    for part in vars(group.moments).values():
        part.mul_(2.0)
    assert state.terms == 7.0 and state.terms.ndim == 0
    exact(list(vars(state.moments).values()), [part[last] for part in vars(group.moments).values()])
    assert state.A.vectors[0].data_ptr() == group.rotation.A[0][last].data_ptr()
    assert state.G.values.data_ptr() == group.rotation.values_G[last].data_ptr()
    x_nOI = torch.randn(count, ROWS, COLUMNS)
    rotated = group.rotation.rotate(x_nOI)[last]
    for own in (state.basis, basis(last)):
        close(rotated, own.rotate(x_nOI[last]), sums=ROWS + COLUMNS)
    close(group.rotation.restore(x_nOI)[last], basis(last).restore(x_nOI[last]), sums=TURNED)


@pytest.mark.parametrize("count, stays", [(3, False), (1, True)])
def test_after_the_first_basis_no_address_changes_and_what_is_derived_follows(count, stays):
    group = begun(count)
    group.stays = stays
    group.rebase(0, A=basis(0).A, G=basis(0).G)
    rotation, places = group.rotation, addresses(group)
    derived, view = (rotation.whitening(0.25), rotation.range_A, rotation.range_G), group.state(0)
    null = replace(basis(7).A, values=basis(7).A.values * torch.tensor([0.0, 1, 1, 1, 1]))
    for index in range(count):
        group.rebase(index, A=null, G=basis(8 + index).G)
    assert (
        group.rotation is rotation
        and addresses(group) == places
        and group.prepared == [True] * count
    )
    exact(rotation.A[0], null.vectors[0].expand(count, -1, -1))
    exact(view.A.values, null.values), exact(view.G.vectors[0], basis(8).G.vectors[0])
    fresh = begun(count)
    for index in range(count):
        fresh.rebase(index, A=null, G=basis(8 + index).G)
    exact(derived, (fresh.rotation.whitening(0.25), fresh.rotation.range_A, fresh.rotation.range_G))
    assert derived[1][0].tolist() == [0, 1, 1, 1, 1] and rotation.whitening(0.25) is derived[0]


@SIZES
@pytest.mark.parametrize("sides", ["A", "G", "AG"])
def test_new_eigenbases_turn_the_first_moment_so_that_it_stands_for_the_same(sides, count):
    group, new = based(count), basis(9)
    state = copied(group.state(0))
    others = [copied(group.state(index)) for index in range(1, count)]
    group.rebase(0, **{side: getattr(new, side) for side in sides})
    after = group.state(0)
    for side in "AG":
        exact(getattr(after, side).vectors, getattr(new if side in sides else state, side).vectors)
    first, before = after.moments.first_OI, state.moments.first_OI
    close(after.basis.restore(first), state.basis.restore(before), sums=TURNED)
    assert (first - before).norm() > 0.1 * before.norm(), "it was turned"
    exact(after.moments.second_OI, state.moments.second_OI)
    exact(
        [tensors(group.state(index)) for index in range(1, count)],
        [tensors(other) for other in others],
    )


def test_layers_that_are_alone_share_the_eigenbasis_of_a_common_input():
    new = basis(1)
    for layer in LAYERS:
        group = LayerGroup([layer])
        group.rebase(0, A=basis(0).A, G=basis(0).G)
        group.rebase(0, A=new.A)
        assert group.rotation.A is new.A.vectors


@SIZES
@pytest.mark.parametrize("kind", [AdamMoments, CorrectedEigenvalues])
def test_a_layer_can_leave_its_basis_and_find_another_one(kind, count):
    group = based(count, moments=kind)
    rotation, old, moments = group.rotation, basis(0), group.state(0).moments
    places, second = addresses(group), old.squared().restore(moments.second_OI)
    first = old.restore(moments.first_OI) if kind is AdamMoments else None
    for index in range(count):
        assert group.rotation is rotation, "layers that are left still have their bases"
        group.leave_basis(index)
    assert group.rotation is None and not any(group.prepared)
    assert group.state(0).A is None and group.state(0).G is None
    close(moments.second_OI, second, sums=TURNED)
    new = basis(5)
    group.rebase(0, A=new.A, G=new.G)
    assert group.prepared == [True] + [False] * (count - 1)
    close(moments.second_OI, new.squared().rotate(second), sums=2 * TURNED)
    if kind is AdamMoments:
        close(new.restore(moments.first_OI), first, sums=2 * TURNED)
    if count > 1:
        assert group.rotation is rotation and addresses(group) == places
        exact(rotation.A[0][1:], torch.eye(COLUMNS).expand(count - 1, -1, -1))


@SIZES
def test_a_saved_state_is_loaded_in_place(count):
    source, group = based(count), begun(count)
    source.terms.fill_(3.0)
    saved = copied(source.state(0))
    own = [x.data_ptr() for x in (group.terms, *vars(group.moments).values())]
    others = [copied(group.state(index)) for index in range(1, count)]
    group.load(0, saved)
    exact(tensors(group.state(0)), tensors(saved))
    saved.moments.first_OI.zero_()
    exact(tensors(group.state(0)), tensors(source.state(0)))
    exact(
        [tensors(group.state(index)) for index in range(1, count)],
        [tensors(other) for other in others],
    )
    assert [x.data_ptr() for x in (group.terms, *vars(group.moments).values())] == own
    group.load(0, replace(saved, G=None, moments=None))
    assert group.rotation is None and group.state(0).A is not None
    exact(
        list(vars(group.state(0).moments).values()),
        [torch.zeros(ROWS, COLUMNS)] * 2 + [torch.zeros(())],
    )
    group.load(0, None)
    exact(tensors(group.state(0)), tensors(LayerGroup(LAYERS[:1], moments=AdamMoments).state(0)))


def test_a_side_that_was_the_identity_when_it_was_saved_begins_as_one():
    group, new = based(), basis(4)
    plain = Eigenbasis((), torch.ones(COLUMNS))
    group.load(0, replace(copied(group.state(0)), A=plain))
    exact(group.rotation.A[0][0], torch.eye(COLUMNS))
    exact(group.rotation.values_A[0], torch.ones(COLUMNS))
    assert group.prepared[0]
    momentum = LayerBasis(basis(0).G, plain).restore(group.state(0).moments.first_OI)
    group.rebase(0, A=new.A)
    close(group.state(0).basis.restore(group.state(0).moments.first_OI), momentum, sums=TURNED)


@SIZES
def test_a_side_that_is_the_identity_has_its_basis_from_the_start_and_no_vectors(count):
    group = LayerGroup([replace(layer, G=Side.identity(ROWS)) for layer in LAYERS[:count]])
    exact(group.state(0).G.values, torch.ones(ROWS))
    group.rebase(0, A=basis(0).A)
    assert group.prepared[0] and group.rotation.G == () and group.state(0).G.vectors == ()
    group.leave_basis(0)
    assert group.state(0).G is not None and group.state(0).A is None
    both = [
        replace(layer, G=Side.identity(ROWS), A=Side.identity(COLUMNS)) for layer in LAYERS[:count]
    ]
    assert all(LayerGroup(both).prepared) and LayerGroup(both).rotation is not None


def joined(sides: list[Eigenbasis]) -> Eigenbasis:
    """Of a layer in groups, from those of its matrices."""
    vectors = torch.cat([side.vectors[0] for side in sides])
    return Eigenbasis((vectors,), torch.cat([side.values for side in sides]))


@pytest.mark.parametrize("stays", [False, True])
def test_a_layer_in_groups_has_a_matrix_for_each(stays):
    group = LayerGroup([IN_GROUPS], moments=AdamMoments)
    moments = AdamMoments.empty((2, ROWS, COLUMNS))
    group.stays = stays
    assert (group.n, group.maps) == (2, 2) and group.moments.first_OI.shape == (2, ROWS, COLUMNS)
    moments.first_OI.copy_(torch.randn(2, ROWS, COLUMNS))
    group.load(0, LayerState(torch.ones(()), moments=moments))
    state = group.state(0)
    exact(list(vars(state.moments).values()), list(vars(moments).values()))
    parts = [basis(0), basis(1)]
    group.rebase(0, *(joined([getattr(part, side) for part in parts]) for side in "AG"))
    for part, turned, own in zip(parts, state.moments.first_OI, moments.first_OI, strict=True):
        close(part.restore(turned), own, sums=TURNED)
    x = torch.randn(2, ROWS, COLUMNS)
    close(group.rotation.rotate(x)[1], parts[1].rotate(x[1]), sums=ROWS + COLUMNS)
    exact(group.by_layer(group.matrices([x]))[0], x)
    exact(repeated(torch.tensor([3.0, 4.0]), 2), torch.tensor([3.0, 3.0, 4.0, 4.0]))
    assert group.any_map(torch.tensor([False, True])).tolist() == [True]


def test_corrected_eigenvalues_stay_in_a_new_basis():
    group = based(moments=CorrectedEigenvalues)
    second = group.moments.second_OI.clone()
    group.rebase(0, A=basis(1).A, G=basis(1).G)
    exact(group.moments.second_OI, second)
