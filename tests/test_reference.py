"""The page ds_kfac/reference.py equals tests/oracle.py, and with it every engine mode, for both
update rules."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from ds_kfac.reference import KFAC
from tests import spread
from tests.close import near
from tests.models import Net, cross_entropy, make_batch, make_net
from tests.oracle import ReferenceKFAC
from tests.spread import PLAIN, Variation, difference

LR, STEPS = 0.02, 13
SPIKES = (3, 11)
"""Steps whose loss is a hundred times as large: the factors, which stand on ten batches, limit the
second."""
INTERVALS = {"update_interval": 1, "refresh_interval": 3, "decay": 0.9}
GRADIENT = {"damping": 0.5, "kl_clip": 5e-4}
BETAS, EPS, DECAY = (0.8, 0.9), 0.01, 0.1
OPTIONS = {"size": 3.0, "ratio": 0.3, "heads": ("head",)}


def backwards(model: torch.nn.Module, variation: Variation, rows: int = 8):
    """The steps of a run, each after its backward."""
    for step in range(STEPS):
        x, y = variation.rows(*make_batch(step, rows))
        loss = cross_entropy(model(x.to(variation.dtype(torch.float32))), y)
        (loss * (100 if step in SPIKES else 1)).backward()
        yield
        model.zero_grad()


def net(start: dict) -> Net:
    model = make_net()  # in float64 its random weights are others
    model.load_state_dict(start)
    return model


def weights(model: torch.nn.Module) -> dict:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradient_by_page(start: dict, variation: Variation = PLAIN) -> dict:
    model = net(start)
    kfac, optimizer = KFAC(model, **INTERVALS), torch.optim.SGD(model.parameters(), lr=LR)
    for _ in backwards(model, variation):
        kfac.precondition(LR, **GRADIENT)
        optimizer.step()
    return weights(model)


def gradient_by_oracle(start: dict, variation: Variation = PLAIN) -> dict:
    model, nus = net(start), []
    kfac = ReferenceKFAC(model, **INTERVALS, **GRADIENT, damping_kind="relative")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in backwards(model, variation):
        kfac.step(LR)
        nus.append(kfac.nu)
        optimizer.step()
    assert min(nus) < 1, "kl-clip must have a say"
    return weights(model)


def rest(model: Net) -> torch.optim.Optimizer:
    """What steps the parameters outside of the nn.Linear layers."""
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    return torch.optim.AdamW(model.norm.parameters(), **options)


def adamw_by_page(start: dict, has_G: bool = False, rows: int = 8) -> dict:
    model = net(start)
    kfac, optimizer = KFAC(model, **INTERVALS, identity_G=not has_G), rest(model)
    for _ in backwards(model, PLAIN, rows):
        kfac.adamw(LR, BETAS, EPS, DECAY, **OPTIONS)
        optimizer.step()
    return weights(model)


def adamw_by_oracle(
    start: dict, variation: Variation = PLAIN, has_G: bool = False, rows: int = 8
) -> dict:
    model = net(start)
    fisher = "empirical" if has_G else "activations_only"
    kfac, optimizer = ReferenceKFAC(model, **INTERVALS, fisher=fisher), rest(model)
    for _ in backwards(model, variation, rows):
        kfac.adam(BETAS, EPS, orthogonal=("first", "middle"), **OPTIONS)
        optimizer.step()
        with torch.no_grad():
            for p in (p for layer in kfac.layers.values() for p in layer.params):
                p.mul_(1 - LR * DECAY).sub_(LR * p.grad)
    return weights(model)


def compare(page, oracle, start: dict) -> spread.Expected:
    found = spread.expected(lambda variation: oracle(start, variation), start)
    assert found.spread < 1e-2, "the bound must mean something"
    assert not spread.within("page", difference(page(start), found.weights, start), found.bound)
    return found


def test_the_page_equals_the_oracle():
    compare(gradient_by_page, gradient_by_oracle, weights(make_net()))


@pytest.mark.parametrize("iterates", [False, True])
@pytest.mark.parametrize("has_G", [False, True])
def test_kfac_adamw_on_the_page_equals_the_oracle(has_G, iterates):
    start, options = weights(make_net()), {"has_G": has_G}
    if iterates:
        options["rows"] = 48  # with fewer, bases of the first batch are no start
    page, oracle = partial(adamw_by_page, **options), partial(adamw_by_oracle, **options)
    devices = {"cpu"} if iterates else set()
    with patch.object(ReferenceKFAC, "iterates", devices), patch.object(KFAC, "iterates", iterates):
        found = compare(page, oracle, start)
    if iterates:
        by_eigh = difference(page(start), found.weights, start)
        assert by_eigh > found.bound, "the iteration must have a say"


@pytest.mark.parametrize("head_is_orthogonalized", [False, True])
def test_a_heads_step_on_the_page_sums_to_zero_over_classes(head_is_orthogonalized):
    """As its gradient does, of which only rounding is left along that sum. Adam's eps is below
    it."""
    model = make_net()
    kfac, before = KFAC(model, **INTERVALS, identity_G=False), model.head.weight.detach().clone()
    next(backwards(model, PLAIN))
    kfac.adamw(LR, BETAS, 1e-14, 0.0, heads=() if head_is_orthogonalized else ("head",))
    moved = model.head.weight.detach() - before
    zeros, why = torch.zeros(moved.shape[1]), "five steps lift what is rounded"
    near(moved.sum(0), zeros, 1e-5 * moved.norm(), why)
