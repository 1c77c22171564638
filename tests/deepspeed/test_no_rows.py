"""A layer whose product no hook sees: it leaves the share at the first captured step, and is
counted."""

import pytest
from torch import Tensor, nn
from torch.autograd import Function

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train
from tests.deepspeed.said import heard
from tests.models import Net, cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


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
        z = self.norm(self.silu(self.first(x)))
        z = self.middle(z).tanh()
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


def muted_worker(cases: dict[str, type[FusedHead]]) -> dict:
    """What is on standard error where a framework has set DeepSpeed's logger to its own level."""
    from ds_kfac.step import proving

    proving.RAISES, found = False, {}
    for case, model in cases.items():
        engine = build(BY_NAME["adam-z2"], 1, model=model())
        with heard("ERROR") as said:  # as transformers' Trainer has it with log_level="error"
            train(engine, 1, steps=3)
        found[case] = "\n".join(said)
        engine.destroy()
    return found


def test_a_layer_without_rows_is_said_whatever_frameworks_mute():
    cases = {"nobody calls it": FusedHead, "called for a metric": Twice}
    found = run_ranks("tests.deepspeed.test_no_rows:muted_worker", world=1, payload=cases)[0]
    for case, text in found.items():
        assert text.count("head: no rows were seen") == 1, (case, text)


def worker(cases: list[tuple[str, bool]]) -> dict:
    from ds_kfac.step import proving

    proving.RAISES, found = False, {}
    for name, late in cases:
        engine = build(BY_NAME[name], 1, model=Late() if late else FusedHead())
        before = engine.kfac.report
        with heard() as early:
            train(engine, 1, steps=1)
        with heard() as others:
            train(engine, 1, steps=9, first=1)
        said = [line for line in (*early, *others) if "no rows were seen" in line]
        added = engine.kfac.report.removeprefix(before)
        found[name, late] = (
            len(early),
            said,
            added,
            engine.kfac.counters()["unpreconditioned_layers"],
        )
        engine.destroy()
    return found


def test_a_head_without_rows_leaves_the_share_and_is_counted():
    cases = [("z2", False), ("adam-z2", False), ("adam-z3", False), ("adam-z2", True)]
    results = run_ranks("tests.deepspeed.test_no_rows:worker", world=2, payload=cases)
    whole, seen = 13 * 17 + 17 * 19 + 19 * 5, 13 * 17 + 17 * 19
    for rank, found in enumerate(results):
        for (name, late), (first, said, added, counted) in found.items():
            assert bool(first) == (len(said) == 1) == (rank == 0), (
                "it is said in the first step, by one rank"
            )
            assert counted == (0 if late else 1), (name, late)
            assert added.count("head: no rows were seen") == 1, (name, late, added)
            assert (
                f"With curvature are {seen / whole:.0%} of the trained matrix parameters, not 100%"
                in added
            )
