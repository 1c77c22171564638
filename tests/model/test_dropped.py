"""Gradients that a program drops between the backwards of a step: the proof asks for the rows of the others."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ds_kfac.model.scan import LayerChoice, scan
from tests.model.proven import proven

WIDTH = 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def checks(model: nn.Module, backwards: int, drops: set[int], *, scaled: float = 1.0):
    """Of a step with so many backwards; before those in ``drops`` what there is of gradients is dropped."""

    def batches() -> Iterator[torch.Tensor]:
        for number in range(backwards):
            if number in drops:
                model.zero_grad()
            if number == backwards - 1 and scaled != 1.0:
                model[0].weight.grad.mul_(scaled)
            yield torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number))

    layers = scan(model, LayerChoice()).layers
    return proven(model, layers, batches(), loss=lambda model, x: model(x).square().mean())


@pytest.mark.parametrize(
    ("backwards", "drops"), [(2, {1}), (4, {1}), (4, {3}), (4, {1, 2}), (30, {8}), (30, {22}), (1, set()), (30, set())]
)
def test_rows_of_a_backward_whose_gradient_was_dropped_are_not_asked_for(backwards, drops):
    assert all(check.fits for check in checks(net(), backwards, drops).values())


def test_a_layer_whose_gradient_alone_is_dropped_fits_by_itself():
    model = net()
    model.zero_grad = lambda *given, **named: setattr(model[2].weight, "grad", None)
    assert all(check.fits for check in checks(model, 3, {1}).values())


@pytest.mark.parametrize("drops", [set(), {2}])
def test_a_gradient_that_is_of_no_backwards_does_not_fit(drops):
    found = checks(net(), 4, drops, scaled=1.01)
    assert not found["0"].fits and found["2"].fits


def test_a_gradient_that_is_gone_altogether_does_not_fit():
    model = net()
    layers = scan(model, LayerChoice()).layers

    def batches():
        yield torch.randn(5, WIDTH)
        model[0].weight.requires_grad_()
        model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        yield torch.randn(5, WIDTH)

    found = proven(model, layers, batches(), loss=lambda model, x: model(x).square().mean())
    assert not found["0"].fits and found["2"].fits
