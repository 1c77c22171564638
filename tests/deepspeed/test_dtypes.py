"""Models whose parameters have several dtypes, or one that is neither fp32 nor the config's."""

import pytest
import torch
from torch import nn

from tests.close import exact
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train
from tests.models import CLASSES, FEATURES, cross_entropy

NARROW = {"first": torch.bfloat16, "middle": torch.float32, "head": torch.float32}
WIDTHS = {"first": (FEATURES, 17), "middle": (17, 19), "head": (19, CLASSES)}


class Mixed(nn.Module):
    """Layers of their dtypes, registered in this order. Their values do not depend on it."""

    def __init__(self, dtypes: dict[str, torch.dtype], order: list[str]) -> None:
        super().__init__()
        for name in order:
            torch.manual_seed(len(name))
            self.add_module(name, nn.Linear(*WIDTHS[name]).to(dtypes[name]))

    def forward(self, x, y):
        for name in WIDTHS:
            layer = self.get_submodule(name)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return cross_entropy(x.float(), y)


def trained(mode: str, dtypes: dict, order: list[str]):
    engine = build(BY_NAME[mode], model=Mixed(dtypes, order), gradient_clipping=0.0)
    train(engine, 1, steps=3)
    kfac = engine.kfac.preconditioner
    assert not kfac.proving.unfit
    return engine, kfac.plan.gradient_dtypes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["z0", "adam-z0"])
def test_it_does_not_matter_of_which_dtype_the_first_layer_is(mode):
    """At stage 0 the optimizer steps parameters as they are; gradients travel in the widest dtype
    of any."""
    orders = ["first", "middle", "head"], ["middle", "head", "first"]
    (narrow, dtypes), (wide, others) = (trained(mode, NARROW, order) for order in orders)
    assert dtypes == others == (torch.float32, torch.float32)
    exact(dict(narrow.module.named_parameters()), dict(wide.module.named_parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["z1", "z2", "adam-z2"])
def test_layers_are_proven_where_deepspeed_adds_up_gradients_in_the_first_one_s_dtype(mode):
    trained(mode, NARROW, list(WIDTHS))


@pytest.mark.ranks(1)
def test_results_of_a_float64_model_are_not_rounded_to_16_bits():
    _, dtypes = trained("adam-z2", dict.fromkeys(WIDTHS, torch.float64), list(WIDTHS))
    assert dtypes == (torch.float32, torch.float32)
