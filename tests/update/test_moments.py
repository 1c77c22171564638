"""Moments of layers: in eigenbases and out of them, in groups of one shape, and what lies in null
spaces."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis
from ds_kfac.curvature.factor import SETTLED, SPIKE, Side
from ds_kfac.update import rotation
from ds_kfac.update.groups import LayerGroup, evenly_spaced, group_by_shape
from ds_kfac.update.rotation import Rotation, mask_null_space, norms, range_mask
from ds_kfac.update.state import AdamMoments, CorrectedEigenvalues
from tests.close import close, exact
from tests.curvature.one_factor import random_basis
from tests.models import linear_layer

ROWS, COLUMNS = 7, 5
NOISE = torch.randn(2, 3, generator=torch.Generator().manual_seed(99))


def divide_(moments: CorrectedEigenvalues, rotated: torch.Tensor, terms: float = 1.0, **options):
    norm_n = rotated.norm()[None]
    options = {"norm_n": norm_n, "terms_n": terms, "decay": 0.9, "damping": 0.1, **options}
    return moments.divide_(rotated[None], **options)


@pytest.mark.parametrize("settled", [True, False])
def test_a_spike_counts_for_ten_times_the_average_once_that_is_settled(settled):
    moments = CorrectedEigenvalues.empty((1, 2, 3))
    for step in range(SETTLED - (not settled)):
        divide_(moments, torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
    before, updates, spike = moments.second_OI[0].clone(), float(moments.updates), 1e3 * NOISE
    quotient, dot, limited = divide_(moments, spike, 2.0, layer_mean=lambda mean_n: mean_n)
    share = SPIKE * float(before.sum()) / float(spike.square().sum()) if settled else 2.0
    assert bool(limited) is settled and moments.updates == updates + 1
    keep = min(0.9, 1 - 1 / (updates + 1))
    expected = keep * before + (1 - keep) * share * spike.square()
    close(moments.second_OI[0], expected, sums=2 * 3)
    close(quotient[0], spike / (expected + 0.1 * expected.mean()), sums=2 * 3)
    close(dot[0], (quotient[0] * spike).sum(), sums=2 * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_whose_size_is_not_finite_changes_no_eigenvalues(bad):
    moments = CorrectedEigenvalues.empty((2, 2, 3))
    for first, second in ((1.0, 1.0), (bad, 3.0)):
        x_nOI = torch.tensor([first, second])[:, None, None].repeat(1, 2, 3)
        norm_n = x_nOI.flatten(1).norm(dim=1)
        moments.divide_(x_nOI, norm_n=norm_n, terms_n=1.0, decay=0.9, damping=0.1)
    exact(moments.updates, torch.tensor([1.0, 2.0]))
    exact(moments.second_OI, torch.tensor([1.0, 5.0])[:, None, None].expand(2, 2, 3))


LAYERS = tuple(linear_layer(name, COLUMNS, ROWS) for name in "abc")
TURNED = 4 * (ROWS + COLUMNS)


def basis(seed: int) -> LayerBasis:
    return random_basis(ROWS, COLUMNS, seed=seed)


def based(count: int = 3, moments: type = AdamMoments) -> LayerGroup:
    """With random moments, and eigenbases of every layer."""
    group = LayerGroup(LAYERS[:count], moments=moments)
    generator = torch.Generator().manual_seed(0)
    for part in vars(group.moments).values():
        part.copy_(torch.rand(part.shape, generator=generator) + 0.5)
    for index in range(count):
        group.rebase(index, A=basis(index).A, G=basis(index).G)
    return group


def addresses(group: LayerGroup) -> list[int]:
    turn, moments = group.rotation, vars(group.moments).values()
    tensors = group.terms, *turn.G, *turn.A, turn.values_G, turn.values_A, *moments
    return [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("count", [1, 3])
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
    assert evenly_spaced(parts).data_ptr() == parts[0].data_ptr()
    assert evenly_spaced(parts[1:2]).shape == (1, 2, 3)
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


EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("side", ["A", "G"])
def test_directions_that_no_row_has_a_part_in_are_those_whose_eigenvalue_is_rounding(side):
    """Block by block, of either side; of a diagonal, whose values no solver has rounded, none; of a
    zero block none."""
    # the least that counts: 2 times 8 eps
    values = torch.tensor([0.0, 15.5 * EPS, 16.5 * EPS, 2.0])
    whole = Eigenbasis((torch.eye(4)[None],), values)
    # 15.5 eps is the largest of its own
    halves = Eigenbasis((torch.eye(2).expand(2, 2, 2),), values)
    still = Eigenbasis((), torch.ones(3))

    def of(*kept: Eigenbasis) -> Rotation:
        bases = [LayerBasis(still, x) if side == "A" else LayerBasis(x, still) for x in kept]
        return Rotation.of(bases, HIGHEST)

    def mask(turn: Rotation) -> torch.Tensor:
        return turn.range_A if side == "A" else turn.range_G

    def counting(turn: Rotation, *second: float) -> torch.Tensor:
        """The directions that count, with these mean squares of the gradients along each."""
        squares = torch.tensor(second).expand(1, 3, 4)
        if side == "A":
            return turn.columns_with_gradients(squares)[0]
        return turn.rows_with_gradients(squares.mT)[0]

    for basis, expected in (
        (whole, [0.0, 0.0, 1.0, 1.0]),
        (halves, [0.0, 1.0, 1.0, 1.0]),
        (Eigenbasis((), values), [1.0] * 4),
        (replace(whole, values=torch.zeros(4)), [1.0] * 4),
    ):
        turn, seen = of(basis), torch.tensor(expected)
        exact(mask(turn)[0], seen)
        exact(counting(turn, 0.0, 0.0, 0.0, 0.0), seen)
        exact(counting(turn, 1e-4, 1e-4, 1.0, 1.0), seen)
        exact(counting(turn, 0.1, 1e-4, 1.0, 1.0), torch.cat([torch.ones(1), seen[1:]]))
        for columns in (mask(turn), torch.zeros_like(mask(turn))):
            s = turn.whitening(0.5, columns if side == "A" else turn.range_A)
            exact(s[1] > 0, s[0] > 0)
    several = of(whole, replace(whole, values=torch.ones(4)))
    exact(mask(several), torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0] * 4]))


def test_rounding_grows_as_the_root_of_the_width_from_64_on():
    for width, least in ((2, 8.0), (64, 8.0), (100, 10.0), (1600, 40.0)):
        values = torch.tensor([0.98 * least * EPS, 1.02 * least * EPS]).repeat(width // 2)
        values[-1] = 1.0
        expected = torch.tensor([0.0, 1.0]).repeat(width // 2)
        exact(range_mask((torch.eye(width)[None],), values), expected, what=str(width))


def test_groups_of_a_layer_have_blocks_of_their_own():
    """A convolution's: two groups of two outputs and three inputs."""
    G = Eigenbasis((torch.eye(2).expand(2, 2, 2),), torch.tensor([0.0, 1.0, 1e-9, 1e-9]))
    A = Eigenbasis((torch.eye(3).expand(2, 3, 3),), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0]))
    x_gOI, basis = torch.ones(2, 2, 3), LayerBasis(G, A)
    expected = torch.tensor([[[0.0, 0.0, 0.0], [1.0] * 3], [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    exact(mask_null_space(x_gOI, basis), expected)  # for a rule of one layer at a time
    turn = Rotation.of([basis], HIGHEST, maps=2)
    columns = turn.columns_with_gradients(torch.zeros(2, 2, 3))
    exact(turn.rows_with_gradients(torch.zeros(2, 2, 3))[:, :, None] * columns[:, None], expected)


@pytest.mark.parametrize("piece", [7, 1 << 22])
def test_norms_are_those_that_fp32_could_not_hold(piece, monkeypatch):
    monkeypatch.setattr(rotation, "PIECE", piece)
    given = [
        torch.full((2, 3), 3e30),
        torch.full((2, 8), 1e-30).T,
        torch.zeros(1, 1),
        torch.full((1, 2), torch.nan),
    ]
    found = torch.stack([norms(x.flatten()) for x in given])
    expected = torch.stack([x.double().norm() for x in given])
    close(found, expected, sums=16, scale=expected.nan_to_num())
