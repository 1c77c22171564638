"""A group: which layers make one, and what becomes of moments that leave an eigenbasis."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis
from ds_kfac.curvature.factor import Side
from ds_kfac.update import rotation
from ds_kfac.update.groups import LayerGroup, evenly_spaced, group_by_shape
from ds_kfac.update.state import AdamMoments, CorrectedEigenvalues
from tests.close import close, exact
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 3, 5
LAYERS = tuple(linear_layer(name, COLUMNS, ROWS) for name in "abc")
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


def addresses(group: LayerGroup) -> list[int]:
    turn, moments = group.rotation, vars(group.moments).values()
    return [
        x.data_ptr()
        for x in (group.terms, *turn.G, *turn.A, turn.values_G, turn.values_A, *moments)
    ]


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
        exact(rotation.G[0][1:], torch.eye(ROWS).expand(count - 1, -1, -1))


def test_a_side_that_was_the_identity_when_it_was_saved_begins_as_one():
    group, new = based(), basis(4)
    plain = Eigenbasis((), torch.ones(COLUMNS))
    group.load(0, replace(based().state(0), A=plain))
    exact(group.rotation.A[0][0], torch.eye(COLUMNS))
    exact(group.rotation.values_A[0], torch.ones(COLUMNS))
    assert group.prepared[0]
    momentum = LayerBasis(basis(0).G, plain).restore(group.state(0).moments.first_OI)
    group.rebase(0, A=new.A)
    close(group.state(0).basis.restore(group.state(0).moments.first_OI), momentum, sums=TURNED)


def test_matrices_at_equal_distances_in_one_memory_are_a_view_and_no_others_are():
    memory = torch.arange(60.0)
    parts = [memory[start : start + 6].view(2, 3) for start in (4, 24, 44)]
    exact(evenly_spaced(parts), torch.stack(parts))
    assert evenly_spaced(parts).data_ptr() == parts[0].data_ptr() and evenly_spaced(
        parts[1:2]
    ).shape == (1, 2, 3)
    others = [
        parts[::-1],
        [*parts[:2], memory[45:51].view(2, 3)],
        [x.mT for x in parts],
        [parts[0], parts[0]],
        [memory[2 * k :][:6].view(2, 3) for k in range(3)],
        [*parts[:2], parts[2].clone()],
        [parts[0], torch.zeros(60)[24:30].view(2, 3)],
        [torch.zeros(6).view(2, 3) for _ in range(2)],
    ]
    assert [evenly_spaced(each) for each in others] == [None] * 8


def test_layers_of_one_shape_and_structure_are_together_as_far_as_memory_allows(monkeypatch):
    shapes = {"a": (7, 5), "b": (13, 5), "c": (7, 5), "d": (5, 7), "e": (13, 5), "f": (7, 5)}
    layers = [linear_layer(name, *shape) for name, shape in shapes.items()]

    def grouped(layers, key=lambda layer: None) -> list[str]:
        return ["".join(each.name for each in group) for group in group_by_shape(layers, key=key)]

    assert grouped(layers) == ["acf", "be", "d"]
    assert grouped(layers, key=None) == [*"abcdef"]
    assert grouped(layers, key=lambda layer: layer.name in "af") == ["af", "be", "c", "d"]
    identity = [replace(layer, G=Side.identity(layer.G.dim)) for layer in layers[:3:2]]
    assert grouped([*identity, layers[5]]) == ["ac", "f"]
    assert grouped([replace(layer, A=Side(7, 4)) for layer in layers[:3:2]]) == ["a", "c"]
    large = [linear_layer(name, 4096, 1024) for name in "abcde"]
    assert grouped(large) == ["abc", "d", "e"], "256 MiB of eigenvectors"
    monkeypatch.setattr(rotation, "BATCHED", 8 * 35)
    assert grouped(layers) == ["acf", "b", "d", "e"], "matrices that are large stay alone"
