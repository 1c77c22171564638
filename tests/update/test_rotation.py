"""Into eigenbases and back, large matrices some rows at a time, and what lies in null spaces."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis
from ds_kfac.update import rotation
from ds_kfac.update.rotation import (
    Rotation,
    change_basis_,
    norms,
    range_mask,
)
from tests.close import close, exact
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 7, 5


@pytest.mark.parametrize("side", ["A alone", "both"])
def test_rows_at_a_time_are_as_the_whole(side, monkeypatch):
    old, new = (random_basis(ROWS, COLUMNS, seed=seed) for seed in range(2))
    if side == "A alone":
        still = Eigenbasis((), torch.ones(ROWS))
        old, new = LayerBasis(still, old.A), LayerBasis(still, new.A)
    turn, x_OI = Rotation.of([new], HIGHEST), torch.randn(1, ROWS, COLUMNS)
    rotated, back, turned = turn.rotate(x_OI), turn.restore(x_OI), x_OI[0].clone()
    change_basis_(turned, old, new)
    monkeypatch.setattr(rotation, "AT_ONCE", 2 * COLUMNS)
    for method, result in ((turn.rotate, rotated), (turn.restore, back)):
        given = x_OI.clone()
        found = method(given, overwrite=True)
        close(found, result, sums=ROWS + COLUMNS)
        assert (found is given) == (side == "A alone"), "in place where rows stay apart"
    given = x_OI[0].clone()
    change_basis_(given, old, new)
    close(given, turned, sums=2 * (ROWS + COLUMNS))


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

    def counting(turn: Rotation, second: torch.Tensor) -> torch.Tensor:
        """The directions that count, with these mean squares [n, 3, 4] of the gradients."""
        if side == "A":
            return turn.columns_with_gradients(second)
        return turn.rows_with_gradients(second.mT)

    without_gradients = torch.tensor([1e-4, 1e-4, 1.0, 1.0]).expand(1, 3, 4)
    with_a_gradient = torch.tensor([0.1, 1e-4, 1.0, 1.0]).expand(1, 3, 4)
    for basis, expected in (
        (whole, [0.0, 0.0, 1.0, 1.0]),
        (halves, [0.0, 1.0, 1.0, 1.0]),
        (Eigenbasis((), values), [1.0] * 4),
        (replace(whole, values=torch.zeros(4)), [1.0] * 4),
    ):
        turn, seen = of(basis), torch.tensor(expected)
        mask = turn.range_A if side == "A" else turn.range_G
        exact(mask[0], seen)
        exact(counting(turn, torch.zeros(1, 3, 4))[0], seen)
        exact(counting(turn, without_gradients)[0], seen)
        exact(counting(turn, with_a_gradient)[0], torch.cat([torch.ones(1), seen[1:]]))
        for columns in (mask, torch.zeros_like(mask)):
            s = turn.whitening(0.5, columns if side == "A" else turn.range_A)
            exact(s[1] > 0, s[0] > 0)
    several = of(whole, replace(whole, values=torch.ones(4)))
    seen = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0] * 4])
    exact(several.range_A if side == "A" else several.range_G, seen)


def test_rounding_grows_as_the_root_of_the_width_from_64_on():
    for width, least in ((2, 8.0), (64, 8.0), (100, 10.0), (1600, 40.0)):
        values = torch.tensor([0.98 * least * EPS, 1.02 * least * EPS]).repeat(width // 2)
        values[-1] = 1.0
        expected = torch.tensor([0.0, 1.0]).repeat(width // 2)
        exact(range_mask((torch.eye(width)[None],), values), expected, what=str(width))


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
