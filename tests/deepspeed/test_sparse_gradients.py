"""Gradients that are not dense: at stage 0 DeepSpeed trains an nn.Embedding(sparse=True), but does
not clip it."""

import pytest
import torch
from torch import nn

from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build, micro_batches
from tests.models import CLASSES, cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
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


def worker(clips: list[float]) -> dict:
    found = {}
    for clip in clips:
        for sparse in (False, True):
            mode = Mode("z0", 0, clip=clip)
            optimizer = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}
            engine = build(mode, 2, model=Table(sparse=sparse), optimizer=optimizer)
            weights = []
            for step in range(STEPS):
                for x, y in micro_batches(step, 2):
                    # some several times, the last one never
                    rows = (10 * x[..., 0]).long() % (ROWS - 1)
                    engine.backward(engine(rows, y))
                    engine.step()
                weights.append(
                    {name: p.detach().clone() for name, p in engine.module.named_parameters()}
                )
            attachment = engine.kfac
            found[clip, sparse] = (
                weights,
                dict(attachment.preconditioner.proving.unfit),
                attachment.report,
            )
            engine.destroy()
    return found


def test_a_sparse_gradient_trains_as_the_dense_one_and_is_not_clipped():
    clips = [0.0, CLIP]
    for found in run_ranks("tests.deepspeed.test_sparse_gradients:worker", world=2, payload=clips):
        for clip in clips:
            (sparse, unfit, report), (dense, *_) = found[clip, True], found[clip, False]
            assert not unfit, "it is known by how much the others were clipped"
            assert ("it does not clip sparse gradients" in report) == bool(clip)
            steps = STEPS if clip == 0 else 1  # what is not clipped goes another way afterwards
            for name, weight in dense[steps - 1].items():
                if clip and name == "table.weight":
                    weight = found[0.0, True][0][0][name]
                # three steps, each 1 / damping as sensitive as its factors
                close(
                    sparse[steps - 1][name],
                    weight,
                    sums=STEPS * 100,
                    condition=100,
                    what=f"{clip} {name}",
                )
        tables = [found[clip, False][0][0]["table.weight"] for clip in clips]
        assert (tables[0] - tables[1]).abs().max() > 1e-2, "dense ones are clipped"
