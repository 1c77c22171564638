"""Gradients that are not dense: at stage 0 DeepSpeed trains an nn.Embedding(sparse=True), but does
not clip it."""

import pytest
import torch
from torch import nn

from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build, micro_batches
from tests.models import CLASSES, cross_entropy

ROWS, STEPS = 7, 3
CLIP = 0.05
"""A part of these gradients' norms."""


class Table(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 5, sparse=sparse)
        self.up, self.head = nn.Linear(5, 17), nn.Linear(17, CLASSES)

    def forward(self, x, y):
        return cross_entropy(self.head(torch.tanh(self.up(self.table(x)))), y)


def trained(sparse: bool, clip: float) -> list[dict[str, torch.Tensor]]:
    """Weights after each step."""
    sgd = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}
    engine = build(Mode("z0", 0, clip=clip, inner=sgd), 2, model=Table(sparse=sparse))
    found = []
    for step in range(STEPS):
        for x, y in micro_batches(step, 2):
            rows = (10 * x[..., 0]).long() % (ROWS - 1)  # some several times, the last one never
            engine.backward(engine(rows, y))
            engine.step()
        found.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    assert not engine.kfac.preconditioner.proving.unfit, "how much others were clipped is known"
    said = "it does not clip sparse gradients" in engine.kfac.report
    assert said == bool(sparse and clip)
    return found


@pytest.mark.ranks(2)
def test_a_sparse_gradient_trains_as_the_dense_one_and_is_not_clipped():
    plain, clipped = trained(False, 0.0), trained(False, CLIP)
    tables = [steps[0]["table.weight"] for steps in (plain, clipped)]
    assert (tables[0] - tables[1]).abs().max() > 1e-2, "dense ones are clipped"
    # what is not clipped goes another way afterwards
    expected = {**clipped[0], "table.weight": tables[0]}
    # three steps, each 1 / damping as sensitive as its factors
    for actual, wanted in ((trained(True, 0.0)[-1], plain[-1]), (trained(True, CLIP)[0], expected)):
        close(actual, wanted, sums=STEPS * 100, condition=100)
