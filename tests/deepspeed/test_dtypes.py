"""Models whose parameters have several dtypes, or one that is neither fp32 nor the config's."""

import pytest
import torch
from torch import nn

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches
from tests.models import CLASSES, FEATURES, cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
NARROW = {"first": "bfloat16", "middle": "float32", "head": "float32"}
WIDTHS = {"first": (FEATURES, 17), "middle": (17, 19), "head": (19, CLASSES)}


class Mixed(nn.Module):
    """Layers of their dtypes, registered in this order. Their values do not depend on it."""

    def __init__(self, dtypes: dict[str, str], order: list[str]) -> None:
        super().__init__()
        for name in order:
            torch.manual_seed(len(name))
            self.add_module(name, nn.Linear(*WIDTHS[name]).to(getattr(torch, dtypes[name])))

    def forward(self, x, y):
        for name in WIDTHS:
            layer = self.get_submodule(name)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return cross_entropy(x.float(), y)


def worker(cases: list[tuple[str, dict, list[str]]]) -> list[tuple]:
    found = []
    for name, dtypes, order in cases:
        engine = build(BY_NAME[name], 1, model=Mixed(dtypes, order), gradient_clipping=0.0)
        kfac = engine.kfac.preconditioner
        for step in range(3):
            for x, y in micro_batches(step, 1):
                engine.backward(engine(x, y))
                engine.step()
        weights = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
        found.append((weights, kfac.plan.gradient_dtypes, dict(kfac.proving.unfit)))
        engine.destroy()
    return found


@pytest.mark.parametrize("mode", ["z0", "adam-z0"])
def test_it_does_not_matter_of_which_dtype_the_first_layer_is(mode):
    """At stage 0 the optimizer steps parameters as they are; gradients travel in the widest dtype
    of any."""
    orders = [["first", "middle", "head"], ["middle", "head", "first"]]
    cases = [(mode, NARROW, order) for order in orders]
    for results in run_ranks("tests.deepspeed.test_dtypes:worker", world=2, payload=cases):
        (narrow, dtypes, unfit), (wide, others, _) = results
        assert dtypes == others == (torch.float32, torch.float32) and not unfit
        for name, weight in wide.items():
            assert torch.equal(narrow[name], weight), name


def test_layers_are_proven_where_deepspeed_adds_up_gradients_in_the_first_one_s_dtype():
    order = list(WIDTHS)
    cases = [(mode, NARROW, order) for mode in ("z1", "z2", "adam-z2")]
    for results in run_ranks("tests.deepspeed.test_dtypes:worker", world=2, payload=cases):
        assert [unfit for *_, unfit in results] == [{}] * len(cases)


def test_results_of_a_float64_model_are_not_rounded_to_16_bits():
    wide = dict.fromkeys(WIDTHS, "float64")
    ((_, dtypes, unfit),) = run_ranks(
        "tests.deepspeed.test_dtypes:worker", world=1, payload=[("adam-z2", wide, list(WIDTHS))]
    )[0]
    assert dtypes == (torch.float32, torch.float32) and not unfit
