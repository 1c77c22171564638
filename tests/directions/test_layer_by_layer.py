"""A rule of one layer at a time: loss scales, gradients that are not finite, null spaces."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis
from ds_kfac.directions.base import StepContext
from ds_kfac.update.rotation import Rotation, mask_null_space
from ds_kfac.update.state import LayerState
from tests.choices import planned
from tests.close import close, exact
from tests.deepspeed.toys import Mean, SoftSign
from tests.directions.outbox import Results
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS = 4, 6
BEFORE = 0.1
"""All entries of the moments."""


def with_a_null_space(basis: LayerBasis) -> LayerBasis:
    """Of which G and A lack a direction each: the first."""
    sides = (basis.G, basis.A)
    return LayerBasis(*(replace(x, values=torch.arange(x.values.numel(), dtype=torch.float32)) for x in sides))


def local(gradient: torch.Tensor, scale: float):
    """The toy rule's part of a step for one layer, and the layer's state."""
    layer, basis = linear_layer("layer", COLUMNS, ROWS), random_basis(ROWS, COLUMNS)
    exchange = SimpleNamespace(
        owned=(layer,), device=torch.device("cpu"), group_indices=lambda layer: (0, 0), outbox=Results
    )
    layout = SimpleNamespace(grad_scale=lambda: scale, last_first=False)
    moments = Mean(torch.full((ROWS, COLUMNS), BEFORE))
    state = replace(LayerState.empty(layer, torch.device("cpu")), A=basis.A, G=basis.G, moments=moments)
    direction, states = SoftSign(planned({}), layout, exchange), {"layer": state}
    return direction.local(StepContext(0, None, {}), {"layer": gradient}, states)


def test_a_rule_that_is_not_linear_does_not_see_the_loss_scale():
    gradient = torch.randn(ROWS, COLUMNS)
    plain, scaled = local(gradient, 1.0), local(1024 * gradient, 1024.0)
    close(scaled.outbox["layer"], 1024 * plain.outbox["layer"], sums=4 * (ROWS + COLUMNS))
    close(scaled.states["layer"].moments.first_OI, plain.states["layer"].moments.first_OI, sums=ROWS + COLUMNS)
    assert float(plain.replaced) == 0 and (plain.states["layer"].moments.first_OI - BEFORE).norm() > 0.1


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_reaches_deepspeeds_check_and_no_moment(wrong):
    gradient = torch.randn(ROWS, COLUMNS)
    gradient[1, 2] = wrong
    found = local(gradient, 1024.0)
    exact(found.outbox["layer"], gradient)
    exact(found.states["layer"].moments.first_OI, torch.full((ROWS, COLUMNS), BEFORE))
    assert float(found.replaced) == 1


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
    whole, x = [with_a_null_space(random_basis(ROWS, COLUMNS, seed=seed)) for seed in range(2)], torch.randn(2, 4, 6)
    joined = [
        Eigenbasis((torch.cat([side.vectors[0] for side in sides]),), torch.cat([side.values for side in sides]))
        for sides in ([basis.G for basis in whole], [basis.A for basis in whole])
    ]
    found = mask_null_space(x, LayerBasis(*joined))
    exact(found, torch.stack([mask_null_space(*pair) for pair in zip(x, whole, strict=True)]))
