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

LR, ROWS, STEPS = 0.02, 8, 13
SPIKES = (3, 11)
"""Steps whose loss is a hundred times as large: the factors, which stand on ten batches, limit the
second."""
INTERVALS = {"update_interval": 1, "refresh_interval": 3, "decay": 0.9}
BETAS, EPS, DECAY = (0.8, 0.9), 0.01, 0.1


def backwards(model: torch.nn.Module, variation: Variation):
    """The steps of a run, each after its backward."""
    for step in range(STEPS):
        x, y = variation.rows(*make_batch(step, ROWS))
        (
            cross_entropy(model(x.to(variation.dtype(torch.float32))), y)
            * (100 if step in SPIKES else 1)
        ).backward()
        yield step
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
        kfac.precondition(LR, damping=0.5, kl_clip=5e-4)
        optimizer.step()
    return weights(model)


def gradient_by_oracle(start: dict, variation: Variation = PLAIN) -> dict:
    model = net(start)
    kfac = ReferenceKFAC(model, **INTERVALS, damping_kind="relative", damping=0.5, kl_clip=5e-4)
    optimizer, nus = torch.optim.SGD(model.parameters(), lr=LR), []
    for _ in backwards(model, variation):
        kfac.step(LR)
        nus.append(kfac.nu)
        optimizer.step()
    assert min(nus) < 1, "kl-clip must have a say"
    return weights(model)


def rest(model: Net) -> torch.optim.Optimizer:
    """What steps the parameters outside of the nn.Linear layers."""
    return torch.optim.AdamW(
        model.norm.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
    )


def adamw_by_page(
    start: dict, variation: Variation = PLAIN, *, identity_G: bool = True, eps: float = EPS
) -> dict:
    model = net(start)
    kfac, optimizer = KFAC(model, **INTERVALS, identity_G=identity_G), rest(model)
    for _ in backwards(model, variation):
        kfac.adamw(LR, BETAS, EPS, DECAY, size=3.0, ratio=0.3, heads=("head",))
        optimizer.step()
    return weights(model)


def adamw_by_oracle(
    start: dict, variation: Variation = PLAIN, *, fisher: str = "activations_only", eps: float = EPS
) -> dict:
    model = net(start)
    kfac, optimizer = ReferenceKFAC(model, **INTERVALS, fisher=fisher), rest(model)
    for _ in backwards(model, variation):
        kfac.adam(BETAS, EPS, orthogonal=("first", "middle"), size=3.0, ratio=0.3, heads=("head",))
        optimizer.step()
        with torch.no_grad():
            for p in (p for layer in kfac.layers.values() for p in layer.params):
                p.mul_(1 - LR * DECAY).sub_(LR * p.grad)
    return weights(model)


@pytest.mark.parametrize(
    "page, oracle",
    [
        (gradient_by_page, gradient_by_oracle),
        (adamw_by_page, adamw_by_oracle),
        (partial(adamw_by_page, identity_G=False), partial(adamw_by_oracle, fisher="empirical")),
    ],
    ids=["gradient", "adamw", "adamw with G"],
)
def test_the_page_equals_the_oracle(page, oracle):
    start = weights(make_net())
    found = spread.expected(lambda variation: oracle(start, variation), start)
    assert found.spread < 1e-2, "the bound must mean something"
    assert not spread.within("page", difference(page(start), found.weights, start), found.bound)


@pytest.mark.parametrize("identity_G", [True, False])
def test_the_page_iterates_as_the_oracle_does(identity_G, monkeypatch):
    fisher = "activations_only" if identity_G else "empirical"
    # with fewer, bases of the first batch are no start
    monkeypatch.setattr("tests.test_reference.ROWS", 48)
    with patch.object(ReferenceKFAC, "iterates", {"cpu"}), patch.object(KFAC, "iterates", True):
        start = weights(make_net())
        found = spread.expected(
            lambda variation: adamw_by_oracle(start, variation, fisher=fisher), start
        )
        page = adamw_by_page(start, identity_G=identity_G)
    assert found.spread < 1e-2, "the bound must mean something"
    assert not spread.within("page", difference(page, found.weights, start), found.bound)
    assert (
        difference(adamw_by_page(start, identity_G=identity_G), found.weights, start) > found.bound
    ), "by eigh"


@pytest.mark.parametrize("head_is_orthogonalized", [False, True])
def test_a_heads_step_on_the_page_sums_to_zero_over_classes(head_is_orthogonalized):
    """As its gradient does, of which only rounding is left along that sum. Adam's eps is below
    it."""
    model = net(weights(make_net()))
    kfac, before = KFAC(model, **INTERVALS, identity_G=False), model.head.weight.detach().clone()
    next(backwards(model, PLAIN))
    kfac.adamw(LR, BETAS, 1e-14, 0.0, heads=() if head_is_orthogonalized else ("head",))
    moved = model.head.weight.detach() - before
    near(
        moved.sum(0),
        torch.zeros(moved.shape[1]),
        1e-5 * moved.norm(),
        "five steps lift what is rounded",
    )
