"""A rule of one layer at a time: moments, gradients that are not finite, null spaces."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis
from ds_kfac.directions.direction import StepContext
from ds_kfac.update.rotation import Rotation, mask_null_space
from tests.choices import planned
from tests.close import close, exact
from tests.deepspeed.toys import Mean, SoftSign
from tests.directions.outbox import exchange_of, whole
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 4, 6
BEFORE = 0.1
"""All entries of the moments."""


def with_a_null_space(basis: LayerBasis) -> LayerBasis:
    """Of which G and A lack a direction each: the first."""
    sides = (basis.G, basis.A)
    return LayerBasis(
        *(replace(x, values=torch.arange(x.values.numel(), dtype=torch.float32)) for x in sides)
    )


class Bounded(SoftSign):
    """Has a finite result and moments of any gradient, as a rule that steps along signs."""

    def layer(self, context, layer, gradient, basis, moments):
        return super().layer(context, layer, gradient.nan_to_num(0.0, 1.0, -1.0), basis, moments)


def stepped(gradient: torch.Tensor, kind: type[SoftSign] = SoftSign):
    """A rule's outcome and result for one layer, and the layer's moments."""
    layer, basis = linear_layer("layer", COLUMNS, ROWS), random_basis(ROWS, COLUMNS)
    direction = kind(planned({}), exchange_of([layer]), Mean)
    (group,) = direction.layer_groups
    group.rebase(0, A=basis.A, G=basis.G)
    group.moments.first_OI.fill_(BEFORE)
    outcome = direction.step(StepContext(0, []), whole({"layer": gradient}))
    return outcome, direction.exchange.results["layer"], group.moments.first_OI[0]


def test_moments_change_in_place_by_what_a_rule_makes_of_them():
    gradient = torch.randn(ROWS, COLUMNS)
    outcome, result, moments = stepped(gradient)
    close(moments, (BEFORE + random_basis(ROWS, COLUMNS).rotate(gradient)) / 2, sums=ROWS + COLUMNS)
    close(result.norm(), gradient.norm(), sums=2 * (ROWS + COLUMNS))
    assert float(outcome.replaced) == 0


@pytest.mark.parametrize("kind", [SoftSign, Bounded])
@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_layer_whose_gradient_is_not_finite_stands_still(wrong, kind):
    gradient = torch.randn(ROWS, COLUMNS)
    gradient[1, 2] = wrong
    outcome, result, moments = stepped(gradient, kind)
    exact(result, torch.zeros(ROWS, COLUMNS))
    exact(moments, torch.full((ROWS, COLUMNS), BEFORE))
    assert float(outcome.replaced) == 1


@pytest.mark.parametrize("identity", ["", "A", "G"])
def test_null_spaces_are_those_of_a_group(identity):
    basis = with_a_null_space(random_basis(ROWS, COLUMNS))
    if identity:
        side = getattr(basis, identity)
        basis = replace(basis, **{identity: Eigenbasis((), torch.zeros_like(side.values))})
    x = torch.randn(ROWS, COLUMNS)
    expected = x.clone()[None]
    Rotation.of([basis], HIGHEST).mask_null_space_(expected)
    exact(mask_null_space(x, basis), expected[0])
    zeros = {"": ROWS + COLUMNS - 1, "A": COLUMNS, "G": ROWS}[identity]
    assert int((expected == 0).sum()) == zeros


def test_null_spaces_of_a_layer_in_groups():
    whole, x = (
        [with_a_null_space(random_basis(ROWS, COLUMNS, seed=seed)) for seed in range(2)],
        torch.randn(2, 4, 6),
    )
    joined = [
        Eigenbasis(
            (torch.cat([side.vectors[0] for side in sides]),),
            torch.cat([side.values for side in sides]),
        )
        for sides in ([basis.G for basis in whole], [basis.A for basis in whole])
    ]
    found = mask_null_space(x, LayerBasis(*joined))
    exact(found, torch.stack([mask_null_space(*pair) for pair in zip(x, whole, strict=True)]))
