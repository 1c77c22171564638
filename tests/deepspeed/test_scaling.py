"""Strategies, wire dtypes and schedules of the distributed part: each trains like tests/oracle.py,
or says by how much it may differ."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.choices import HALF
from tests.covering import some
from tests.deepspeed.modes import KFAC, Mode
from tests.deepspeed.runs import build, expected, train, weights
from tests.models import CLASSES, FEATURES, cross_entropy, make_net
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed


class QueryNet(nn.Module):
    """Three layers see one input, two another; one input of equal values lies elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(FEATURES, 7), nn.Linear(FEATURES, 7)
        self.v, self.other = nn.Linear(FEATURES, 7, bias=False), nn.Linear(FEATURES, 7)
        self.gate, self.up = nn.Linear(7, 9), nn.Linear(7, 9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.q(x)) * self.k(x) + self.v(x) + self.other(x.clone())
        z = self.head(torch.sigmoid(self.gate(h)) * self.up(h))
        return z if y is None else cross_entropy(z, y)


def options(**blocks):
    own = {
        key: {**KFAC.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in blocks.items()
    }
    return {**KFAC, **own}


FRACTIONS = {2: (1, 2), 4: (1, 2, 4), 3: (3,)}
CORRECTED = {"preconditioner": {"eigenvalues": "corrected", "kl_clip": 0.001}}
WIRE = {"communication": {"dtype": "bf16"}}
FORMS = {
    "offload": ({"offload": {"device": "cpu"}}, 0.0),
    "bf16 on the wire": (WIRE, 12 * 2**-8),  # A, G, A twice: 3 in 4 steps
    "bf16 gradients too": ({**WIRE, "plan": HALF}, 16 * 2**-8),
}


def cases(world: int) -> dict:
    """Name -> (stage, adam, blocks, what the wire may add to rounding in fp32: the reference has no
    wire)."""
    found = {}
    for workers in FRACTIONS[world]:
        strategy = {"assignment": {"gradient_worker_fraction": workers / world}}
        found[f"workers {workers}"] = (0, False, strategy, 0.0)
        found[f"workers {workers}, corrected"] = (0, False, {**strategy, **CORRECTED}, 0.0)
        found[f"workers {workers}, adam"] = (0, True, strategy, 0.0)
    found = {name: found[name] for name in some(found, world)}
    for index, (stage, form) in enumerate(product((0, 2, 3), FORMS)):
        if stage == 3 if world == 3 else index % 2 == world // 4:  # by turns on two and four ranks
            found[f"stage {stage}, {form}"] = (stage, False, *FORMS[form])
    return found


def compared(mode: Mode, rounding: float, **options) -> dict:
    """How far steps of two micro-batches are from the oracle's, and this rank from rank 0; what the
    engine says."""
    engine = build(mode, 2, model=make_net(QueryNet))
    initial, found = weights(engine), None
    if dist.get_rank() == 0:
        options = {"kfac_config": mode.kfac, "model": QueryNet, **options}
        found = expected(mode, 2, dist.get_world_size(), initial, **options)
    train(engine, 2)
    final = weights(engine)
    drift = copy.deepcopy(final)
    for tensor in drift.values():
        dist.broadcast(tensor, 0)
    result = {
        "difference": difference(final, found.weights, initial) if found else 0.0,
        "bound": found.bound + rounding if found else 1.0,
        "drift": max(float((drift[n] - final[n]).abs().max()) for n in final),
        "groups": engine.kfac.preconditioner.observations.groups,
        "counters": engine.kfac.counters(),
        "report": engine.kfac.report,
    }
    engine.destroy()
    return result


def complaints(results: list[dict], shares: Callable[[str], bool] = lambda name: True) -> list[str]:
    """About ``compared`` of every rank, by name; ``shares``: whether layers that share an input are
    found."""
    wrong = []
    for rank, own in enumerate(results):
        for name, result in own.items():
            wrong += within(name, result["difference"], result["bound"])
            if result["drift"]:
                wrong.append(f"{name}: rank {rank} drifted from rank 0 by {result['drift']:.1e}")
            if result["groups"] != ((("q", "k"), ("gate", "up")) if shares(name) else None):
                wrong.append(f"{name}: layers that share an input: {result['groups']}")
    return wrong


def worker(_) -> dict:
    table = cases(dist.get_world_size())
    return {
        name: compared(Mode("scaling", stage, adam=adam, kfac=options(**blocks)), rounding)
        for name, (stage, adam, blocks, rounding) in table.items()
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_strategies_and_wires_match_reference(world):
    wrong = complaints(run_ranks("tests.deepspeed.test_scaling:worker", world=world))
    assert not wrong, "\n".join(wrong)
