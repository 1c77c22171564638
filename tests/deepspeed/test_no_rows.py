"""A layer whose product no hook sees: it leaves the share at the first captured step, and is
counted."""

from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train
from tests.deepspeed.said import heard
from tests.models import Net, cross_entropy


class Hidden(Function):
    """x [.., I] and w [O, I] -> [.., O], as a fused kernel has it."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class FusedHead(Net):
    fused = True

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(19, 5, bias=False)

    def forward(self, x, y=None):
        z = self.middle(self.norm(self.silu(self.first(x)))).tanh()
        z = Hidden.apply(z, self.head.weight) if self.fused else self.head(z)
        return z if y is None else cross_entropy(z, y)


class Late(FusedHead):
    """Its head is a module's from the second step on."""

    def forward(self, x, y=None):
        result = super().forward(x, y)
        self.fused = False
        return result


class Twice(FusedHead):
    """Its head is called, too, as for a metric, but no loss depends on that."""

    def forward(self, x, y=None):
        self.head(self.middle(self.norm(self.silu(self.first(x)))).tanh())
        return super().forward(x, y)


CASES = [("z2", FusedHead), ("adam-z3", FusedHead), ("adam-z2", Late), ("adam-z2", Twice)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "model"), CASES)
def test_a_head_without_rows_leaves_the_share_and_is_counted(name, model):
    """It is said whatever frameworks mute, as transformers' Trainer does with log_level="error"."""
    with patch.object(proving, "RAISES", False):
        engine = build(BY_NAME[name], model=model())
        before = engine.kfac.report
        with heard("ERROR") as early:
            train(engine, 1, steps=1)
        with heard("ERROR") as others:
            train(engine, 1, steps=9, first=1)
    said = [line for line in (*early, *others) if "no rows were seen" in line]
    first = dist.get_rank() == 0
    assert bool(early) == (len(said) == 1) == first, "in the first step, by one rank"
    assert engine.kfac.counters()["unpreconditioned_layers"] == (model is not Late)
    added = engine.kfac.report.removeprefix(before)
    assert added.count("head: no rows were seen") == 1
    whole, seen = 13 * 17 + 17 * 19 + 19 * 5, 13 * 17 + 17 * 19
    assert f"{seen / whole:.0%} of the trained matrix parameters have curvature" in added
