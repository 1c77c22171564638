"""Into eigenbases and back, large matrices some rows at a time, and what lies in null spaces."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis
from ds_kfac.update import rotation
from ds_kfac.update.rotation import Rotation, change_basis_, range_mask
from tests.close import close, exact
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 7, 5


@pytest.mark.parametrize("side", ["A alone", "both"])
def test_rows_at_a_time_are_as_the_whole(side, monkeypatch):
    basis = random_basis(ROWS, COLUMNS)
    if side == "A alone":
        basis = LayerBasis(Eigenbasis((), torch.ones(ROWS)), basis.A)
    turn, x_OI = Rotation.of([basis], HIGHEST), torch.randn(1, ROWS, COLUMNS)
    expected, back = turn.rotate(x_OI), turn.restore(x_OI)
    monkeypatch.setattr(rotation, "AT_ONCE", 2 * COLUMNS)
    for method, result in ((turn.rotate, expected), (turn.restore, back)):
        given = x_OI.clone()
        found = method(given, overwrite=True)
        close(found, result, sums=ROWS + COLUMNS)
        assert (found is given) == (side == "A alone"), "in place where rows stay apart"


@pytest.mark.parametrize("side", ["A alone", "both"])
def test_moments_are_turned_by_rows_in_place(side, monkeypatch):
    old, new = (random_basis(ROWS, COLUMNS, seed=seed) for seed in range(2))
    if side == "A alone":
        still = Eigenbasis((), torch.ones(ROWS))
        old, new = LayerBasis(still, old.A), LayerBasis(still, new.A)
    x_OI = torch.randn(ROWS, COLUMNS)
    expected, given = x_OI.clone(), x_OI.clone()
    change_basis_(expected, old, new)
    monkeypatch.setattr(rotation, "AT_ONCE", 2 * COLUMNS)
    change_basis_(given, old, new)
    close(given, expected, sums=2 * (ROWS + COLUMNS))
    assert (given - x_OI).norm() > 0.1 * x_OI.norm()


def test_several_layers_are_rotated_at_once(monkeypatch):
    bases = [
        LayerBasis(Eigenbasis((), torch.ones(3)), random_basis(3, 3, seed=seed).A)
        for seed in range(2)
    ]
    turn, x_nOI = Rotation.of(bases, HIGHEST), torch.randn(2, 3, 3)
    monkeypatch.setattr(rotation, "AT_ONCE", 3)
    assert torch.equal(turn.rotate(x_nOI.clone(), overwrite=True), turn.rotate(x_nOI))


def test_the_eigenbases_of_each_layer_are_views():
    bases = [
        LayerBasis(Eigenbasis((), torch.rand(3)), random_basis(3, 4, seed=seed).A)
        for seed in range(2)
    ]
    turn = Rotation.of(bases)
    for index, (view, one) in enumerate(zip(turn.by_layer(), bases, strict=True)):
        exact(
            [*view.A.vectors, view.A.values, view.G.values],
            [*one.A.vectors, one.A.values, one.G.values],
        )
        assert view.G.vectors == () and view.A.vectors[0].data_ptr() == turn.A[0][index].data_ptr()


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
        return Rotation.of(
            [LayerBasis(still, x) if side == "A" else LayerBasis(x, still) for x in kept], HIGHEST
        )

    def masked(turn: Rotation, x: torch.Tensor, **options) -> torch.Tensor:
        x = x if side == "A" else x.mT.contiguous()
        turn.mask_null_space_(x.view(-1, *x.shape[-2:]), **options)
        return x if side == "A" else x.mT

    for basis, expected in (
        (whole, [0.0, 0.0, 1.0, 1.0]),
        (halves, [0.0, 1.0, 1.0, 1.0]),
        (Eigenbasis((), values), [1.0] * 4),
        (replace(whole, values=torch.zeros(4)), [1.0] * 4),
    ):
        turn, seen = of(basis), torch.tensor(expected)
        exact(turn.range_A[0], seen if side == "A" else torch.ones(3))
        exact(turn.range_G[0], seen if side == "G" else torch.ones(3))
        is_above, s = turn.whitening(0.5)[:, 0]
        exact(is_above, turn.range_A[0])
        exact(s > 0, turn.range_A[0] > 0)
        exact(masked(turn, torch.ones(3, 4)), seen.expand(3, 4))
        exact(
            masked(turn, torch.ones(3, 4), columns=False),
            torch.ones(3, 4) if side == "A" else seen.expand(3, 4),
        )
    several = of(whole, replace(whole, values=torch.ones(4)))
    seen = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0] * 4])
    exact(several.range_A if side == "A" else several.range_G, seen)
    exact(masked(several, torch.ones(2, 3, 4)), seen[:, None].expand(2, 3, 4))


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
    x_gOI = torch.ones(2, 2, 3)
    Rotation.of([LayerBasis(G, A)], HIGHEST, maps=2).mask_null_space_(x_gOI)
    exact(
        x_gOI,
        torch.tensor([[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]]),
    )
