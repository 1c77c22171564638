"""What ``engine.kfac.explain`` says of a layer, against what a run did to it; one rank alone may
ask."""

import contextlib
import io
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.step import proving, warner
from tests.choices import STAGGERED
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, train
from tests.models import cross_entropy
from tests.ranks import run_ranks
from tests.step.test_proving import Helped, Zero

pytestmark = pytest.mark.distributed
LATE = {**KFAC, "burn_in": {"steps": 0}, "eigenbasis": {"refresh_interval": 4}}


def make_zero(model: nn.Module) -> None:
    """Make its loss, and so all gradients, zero."""
    model.register_forward_hook(lambda module, args, loss: 0 * loss)


def fails(matrix):
    raise torch.linalg.LinAlgError("did not converge")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(5))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return cross_entropy(x, y)


class Own(nn.Linear):
    """A model that is one layer."""

    def forward(self, x, y):
        return cross_entropy(super().forward(x), y)


def asked_worker(name: str) -> list:
    """What a rank says before the first step and after the third, of the layer that rank 1
    keeps."""
    engine, found = build(BY_NAME[name], 1), []
    for steps in (0, 3):
        train(engine, 1, steps)
        if dist.get_rank() == 1:  # the other asks nothing: no collective
            calls = engine.kfac.counters()
            found.append(
                (engine.kfac.explain("middle"), engine.kfac.explain("first"), engine.kfac.explain())
            )
            assert engine.kfac.counters() == calls
    for unknown in ("midle", "norm"):
        try:
            found.append(engine.kfac.explain(unknown))
        except ValueError as error:
            found.append(str(error))
    kfac = engine.kfac.preconditioner
    keeps = [name for name, state in kfac.state.items()]
    engine.destroy()
    return [*found, keeps]


@pytest.mark.parametrize("name", ["z2", "adam-z2"])
def test_one_rank_alone_may_ask(name):
    _, (before, after, unknown, left_out, keeps) = run_ranks(
        "tests.deepspeed.test_explain:asked_worker", world=2, payload=name
    )
    assert keeps == ["middle"], "else the texts below are another rank's"
    middle, first, table = before
    assert "state: no basis: A has no update yet" in middle and "next refresh: step 0" in middle
    assert (
        "state: known on rank 0: call explain there" in first
        and "A: dense, 14 wide; on rank 0: call" in first
    )
    assert [line.split()[0] for line in table.splitlines()] == ["layer", "first", "middle", "head"]
    middle, first, table = after
    assert "middle (Linear, [19, 17]) after 3 applied steps, seen from rank 1:" in middle
    assert "state: basis of step 2" in middle and "3 updates; last batch: step 2, 24 rows" in middle
    assert "next update: step 3; next refresh: step 4" in middle and "until step 50" in middle
    assert ("gradient and moments: preconditioned and kept on rank 1" in middle) == name.startswith(
        "adam"
    )
    assert "basis of step 2" in table and "known on rank 0" in table
    assert (
        "midle" in unknown and "near it are middle" in unknown and "explain() lists all" in unknown
    )
    assert left_out.endswith(
        "34 parameters) is not preconditioned; at attach: LayerNorm is not in kfac.layers.types"
    )


def why_worker(_) -> dict[str, str]:
    proving.RAISES = False
    found: dict[str, str] = {}

    def said(
        what: str, layer: str, steps: int, change=lambda engine: None, model=None, **block
    ) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            engine = build(BY_NAME["z2"], 1, model=model, kfac={**KFAC, **block})
            change(engine)
            train(engine, 1, steps)
        found[what] = engine.kfac.explain(layer)
        engine.destroy()

    said("not proven", "middle", 1, model=Helped())
    said("no gradient", "first", 1, model=Zero())
    said("the model", "(model)", 1, model=Own(13, 13))
    with patch("ds_kfac.curvature.eigen.eigh", fails):
        said("failed", "middle", 1)
    said("few rows", "middle", 1, factor={**KFAC["factor"], "rows": 1000})
    said("staggered", "middle", 1, plan=STAGGERED, **LATE)
    said("adaptive", "middle", 5, adaptive=100.0, **LATE)

    def later(engine, step, work):
        train(engine, 1, step)
        work(engine)

    def spoil(engine):
        """Inputs whose squares are not finite, though gradients are: else DeepSpeed would skip the
        step."""
        engine.module.head.register_forward_pre_hook(lambda module, args: (args[0] * 1e20,))
        engine.module.head.register_forward_hook(lambda module, args, output: output * 1e-20)

    def empty(engine):
        engine.module.middle.register_forward_pre_hook(lambda module, args: (args[0] * 0,))

    def fail(engine):
        patch("ds_kfac.curvature.eigen.eigh", fails).start()

    def freeze(engine):
        engine.module.middle.weight.requires_grad_(False)

    def break_hook(engine):
        kfac = engine.kfac.preconditioner
        kfac.capture.fail(
            next(layer for layer in kfac.layers if layer.name == "middle"), TypeError("no matrix")
        )

    said("frozen", "middle", 2, lambda engine: later(engine, 2, freeze))
    said("hook", "middle", 1, lambda engine: later(engine, 3, break_hook))
    said("hook, proven", "middle", 1, lambda engine: later(engine, 2, break_hook))
    said(
        "no rows",
        "first",
        1,
        lambda engine: later(engine, 2, lambda engine: make_zero(engine.module)),
    )
    said("zero", "middle", 1, empty)
    said("not finite", "head", 1, lambda engine: later(engine, 1, spoil))
    said("kept", "middle", 1, lambda engine: later(engine, 2, fail))
    return found


@pytest.fixture(scope="module")
def why() -> dict[str, str]:
    return run_ranks("tests.deepspeed.test_explain:why_worker", world=1)[0]


SAYS = {
    "not proven": [
        "no basis: not proven, its rows do not make up its gradient: its gradient is not that of "
        "the rows "
        "of 1 calls",
        "the next update proves again; a layer keeps its raw gradient",
        "next update: step 1; next refresh: step 2",
    ],
    "no gradient": [
        "no basis: A has taken no batch yet",
        "step 0, 0 rows",
        "step 1; next refresh: step 1",
    ],
    "the model": ["(model) (Linear, [13, 14])", "state: basis of step 0"],
    "zero": ["no basis: A is zero, as all its rows are"],
    "failed": ["no basis: A could not be decomposed on rank 0 in step 0"],
    "few rows": [
        "last batch: step 0, 12 rows, fewer than the 1000 that an update asks for (factor.rows)"
    ],
    "staggered": ["state: basis of step 0", "staggered: A by "],
    "adaptive": ["adaptive: A every "],
    "no rows": [
        "2 updates; last batch: step 2, 0 rows on the ranks that contribute, so it left the "
        "factor as it was; "
        "unchanged since step 1"
    ],
    "not finite": [
        "1 updates; last batch: step 1, 12 rows, not finite, so it left the factor as it was; "
        "unchanged since step 0"
    ],
    "frozen": [
        "step 3, 0 rows as its weight is frozen, so it left the factor as it was; unchanged since "
        "step 1"
    ],
    "hook": [
        "basis of step 2; a hook failed (TypeError: no matrix): its rows are not taken any more "
        "in this process, "
        "and from the next check of rows on it is without curvature"
    ],
    "hook, proven": [
        "no basis: a hook failed (TypeError: no matrix): its rows are not taken any more in "
        "this process;"
    ],
    "kept": [
        "basis of step 0; the refresh of A in step 2 failed on rank 0; the refresh of G in step 2 "
        "failed"
    ],
}


@pytest.mark.parametrize("what", SAYS)
def test_it_says_what_became_of_the_factors(why, what):
    for text in SAYS[what]:
        assert text in why[what], why[what]


def without_worker(_) -> list[list[str]]:
    """What each update has warned of, and the counter after it."""
    said: list[list[str]] = []
    engine = build(BY_NAME["adam-z2"], 1, model=Deep())
    make_zero(engine.module)
    with patch.object(warner.logger, "warning") as warning:
        for step in range(7):
            train(engine, 1, 1, first=step)
            said.append([call.args[0] for call in warning.call_args_list])
            assert engine.kfac.counters()["unpreconditioned_layers"] == 5
    engine.destroy()
    return said


def test_layers_without_a_basis_are_named_once_after_five_updates():
    said = run_ranks("tests.deepspeed.test_explain:without_worker", world=1)[0]
    assert [len(texts) for texts in said] == [0, 0, 0, 0, 1, 1, 1]
    assert (
        "5 updates of theirs in a row: layers.0, layers.1, layers.2 and 2 more; engine.kfac.explain"
        in said[-1][0]
    )


def in_turn_worker(_) -> list[str]:
    engine = build(
        BY_NAME["adam-z2"],
        1,
        model=Deep(),
        kfac={"factor": {"update_interval": 2}, "burn_in": {"steps": 0}},
    )
    with patch.object(warner.logger, "warning") as warning:
        for step in range(14):
            engine.module.layers[1].requires_grad_(step % 2 == 1 or step == 0)
            engine.module.layers[2].requires_grad_(step != 4)
            train(engine, 1, 1, first=step)
    engine.destroy()
    return [call.args[0] for call in warning.call_args_list]


def test_layers_that_are_trained_in_other_steps_than_those_of_their_updates_are_named_once():
    (said,) = run_ranks("tests.deepspeed.test_explain:in_turn_worker", world=1)[0]
    assert (
        "frozen at the last 5 updates, so their factors stay as they are: layers.1. If other steps"
        in said
    )


def resumed_worker(folder: str) -> list[str]:
    engine = build(BY_NAME["z2"], 1)
    train(engine, 1, 2)
    engine.save_checkpoint(folder, tag="tag")
    engine.destroy()
    engine, said = build(BY_NAME["z2"], 1), []
    engine.load_checkpoint(folder, tag="tag")
    said.append(engine.kfac.explain("middle"))
    train(engine, 1, 1, first=2)
    said.append(engine.kfac.explain("middle"))
    engine.destroy()
    return said


def test_a_basis_of_a_checkpoint_is_one_until_the_next_refresh(tmp_path):
    loaded, stepped = run_ranks(
        "tests.deepspeed.test_explain:resumed_worker", world=1, payload=str(tmp_path)
    )[0]
    assert "state: basis of a checkpoint" in loaded
    assert "2 updates, none since this process started or loaded" in loaded
    assert (
        "state: basis of step 2" in stepped and "3 updates; last batch: step 2, 12 rows" in stepped
    )
