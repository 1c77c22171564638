"""What ``engine.kfac.explain`` says of a layer, against what a run did to it; one rank alone may
ask."""

import tempfile
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.step import proving
from tests.choices import STAGGERED
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, train
from tests.deepspeed.said import error_of, heard
from tests.models import Net, cross_entropy, make_net
from tests.step.test_proving import Helped, Zero

pytestmark = pytest.mark.distributed
LATE = {**KFAC, "burn_in": {"steps": 0}, "eigenbasis": {"refresh_interval": 4}}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(5))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return cross_entropy(x, y)


@pytest.mark.parametrize("name", ["z2", "adam-z2"])
@pytest.mark.ranks(2)
def test_one_rank_alone_may_ask(name):
    """Before the first step and after the third, of the layer that rank 1 keeps."""
    engine = build(BY_NAME[name], 1)
    explain, asks = engine.kfac.explain, dist.get_rank() == 1
    if asks:  # the other asks nothing: no collective
        middle, first = explain("middle"), explain("first")
        assert "no basis: A has no update yet" in middle and "next refresh: step 0" in middle
        assert "state: known on rank 0: call explain there" in first
        assert "A: dense, 14 wide; on rank 0: call" in first
        rows = [line.split()[0] for line in explain().splitlines()]
        assert rows == ["layer", "first", "middle", "head"]
    train(engine, 1, 3)
    if asks:
        calls = engine.kfac.counters()
        middle = explain("middle")
        assert "middle (Linear, [19, 17]) after 3 applied steps, seen from rank 1:" in middle
        assert "basis of step 2" in middle and "3 updates; last batch: step 2, 24 rows" in middle
        assert "next update: step 3; next refresh: step 4" in middle and "until step 50" in middle
        kept = "gradient and moments: preconditioned and kept on rank 1" in middle
        assert kept == name.startswith("adam")
        assert "basis of step 2" in explain() and "known on rank 0" in explain()
        assert engine.kfac.counters() == calls
    unknown = error_of(lambda: explain("midle"))
    assert "similar names: middle" in unknown and "engine.kfac.explain()" in unknown
    assert "34 parameters) is not preconditioned" in explain("norm")
    assert explain("norm").endswith(": LayerNorm is not in kfac.layers.types")


# what became of the factors


def spoil(engine) -> None:
    """Inputs whose squares are not finite, though gradients are: else DeepSpeed would skip the
    step."""
    engine.module.head.register_forward_pre_hook(lambda module, args: (args[0] * 1e20,))
    engine.module.head.register_forward_hook(lambda module, args, output: output * 1e-20)


def empty(engine) -> None:
    engine.module.middle.register_forward_pre_hook(lambda module, args: (args[0] * 0,))


def make_zero(engine) -> None:
    """Make its loss, and so all gradients, zero."""
    engine.module.register_forward_hook(lambda module, args, loss: 0 * loss)


def fail(engine) -> None:
    error = torch.linalg.LinAlgError("did not converge")
    patch("ds_kfac.curvature.eigen.eigh", side_effect=error).start()


def freeze(engine) -> None:
    engine.module.middle.weight.requires_grad_(False)


def break_hook(engine) -> None:
    kfac = engine.kfac.preconditioner
    (layer,) = [layer for layer in kfac.layers if layer.name == "middle"]
    kfac.capture.fail(layer, TypeError("no matrix"))


def load(engine) -> None:
    folder = tempfile.mkdtemp()
    engine.save_checkpoint(folder, tag="tag")
    engine.load_checkpoint(folder, tag="tag")


LEFT = "so the factor did not change; unchanged since step"
HOOK = "a hook failed (TypeError: no matrix): "
NOT_PROVEN = "no basis: not proven, because its rows do not make up its gradient: "
SAYS = {
    "not proven": (
        {"model": Helped},
        [NOT_PROVEN, "the rows of the 1 calls", "the next update repeats the proof; a layer"],
    ),
    "no gradient": (
        {"layer": "first", "model": Zero},
        ["no basis: A has taken no batch yet", "step 0, 0 rows", "step 1; next refresh: step 1"],
    ),
    "failed": ({"event": fail}, ["no basis: A could not be decomposed on rank 0 in step 0"]),
    "kept": (
        {"event": fail, "after": 2},
        ["basis of step 0; the refresh of A in step 2 failed on rank 0"],
    ),
    "few rows": (
        {"block": {"factor": {**KFAC["factor"], "rows": 1000}}},
        ["step 0, 12 rows, fewer than the 1000 that an update asks for (factor.rows)"],
    ),
    "staggered and adaptive": (
        {"after": 4, "block": {"plan": STAGGERED, "adaptive": 100.0, **LATE}},
        ["staggered: A by ", "adaptive: A takes 1 of "],
    ),
    "frozen": (
        {"event": freeze, "after": 2, "steps": 2},
        [f"step 3, 0 rows because its weight is frozen, {LEFT} 1"],
    ),
    "a hook that failed": (
        {"event": break_hook, "after": 3},
        [f"basis of step 2; {HOOK}", "; after the next check of rows, "],
    ),
    "no rows": (
        {"layer": "first", "event": make_zero, "after": 2},
        [f"2 updates; last batch: step 2, 0 rows on the ranks that contribute, {LEFT} 1"],
    ),
    "zero": ({"event": empty}, ["no basis: A is zero, because all its rows are zero"]),
    "not finite": (
        {"layer": "head", "event": spoil, "after": 1},
        [f"1 updates; last batch: step 1, 12 rows, but its values are not finite, {LEFT} 0"],
    ),
    "a checkpoint": (
        {"event": load, "after": 2, "steps": 0},
        ["state: basis of a checkpoint", "2 updates, none since this process started or loaded"],
    ),
}
"""What was done to a run, and what is said of a layer after it."""


def explained(*, layer="middle", model=Net, block=(), event=None, after=0, steps=1) -> str:
    """What is said of a layer some steps after an event.

    Args:
        after: steps before the event.
    """
    engine = build(BY_NAME["z2"], model=make_net(model), kfac={**KFAC, **dict(block)})
    train(engine, 1, after)
    if event:
        event(engine)
    train(engine, 1, steps)
    return engine.kfac.explain(layer)


@pytest.mark.ranks(1)
def test_it_says_what_became_of_the_factors():
    proving.RAISES = False
    for name, (run, texts) in SAYS.items():
        said = explained(**run)
        patch.stopall()
        assert all(text in said for text in texts), (name, said)


@pytest.mark.ranks(1)
def test_layers_without_a_basis_are_named_once_after_five_updates():
    engine = build(BY_NAME["adam-z2"], 1, model=Deep())
    make_zero(engine)
    with heard() as said:
        for step in range(7):
            train(engine, 1, 1, first=step)
            assert len(said) == (step >= 4), said
            assert engine.kfac.counters()["unpreconditioned_layers"] == 5
    names = "layers.0, layers.1, layers.2 and 2 more"
    assert f"5 updates of their factors in a row: {names}. engine.kfac.explain" in said[0]


@pytest.mark.ranks(1)
def test_layers_that_are_trained_in_other_steps_than_those_of_their_updates_are_named_once():
    block = {"factor": {"update_interval": 2}, "burn_in": {"steps": 0}}
    engine = build(BY_NAME["adam-z2"], 1, model=Deep(), kfac=block)
    with heard() as messages:
        for step in range(14):
            engine.module.layers[1].requires_grad_(step % 2 == 1 or step == 0)
            engine.module.layers[2].requires_grad_(step != 4)
            train(engine, 1, 1, first=step)
    (said,) = messages
    assert "frozen at the last 5 updates" in said and "stay as they are: layers.1. " in said, said
