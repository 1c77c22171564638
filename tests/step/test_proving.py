"""What a run does with the proof: when it proves, what becomes of a layer that does not fit, and
when it comes back."""

import contextlib
import io
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, train, weights
from tests.models import Net, cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
OFTEN = {**KFAC, "eigenbasis": {"refresh_interval": 1}, "burn_in": {"steps": 0}}


class Helped(Net):
    """Some rows of a layer go another way, which is not followed."""

    helped = True

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        if self.helped:
            some = (z[:, :1, None] * self.middle.weight).sum(dim=-1)
            z = torch.cat([some, self.middle(z[:, 1:])], dim=1)
        else:
            z = self.middle(z)
        z = self.head(torch.tanh(z))
        return z if y is None else cross_entropy(z, y)


class Zero(Net):
    """Nothing below the head has a gradient in the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Shared(Net):
    """Two layers with one A of 40 inputs, and so few outputs of the first that alone it would have
    one probe."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.narrow, self.wide = nn.Linear(19, 40), nn.Linear(40, 3), nn.Linear(40, 40)
        self.head = nn.Linear(40, 5)

    def forward(self, x, y=None):
        z = torch.tanh(self.up(self.middle(self.norm(self.silu(self.first(x))))))
        return cross_entropy(self.head(self.wide(z) * self.narrow(z).mean(dim=-1, keepdim=True)), y)


def run(name: str, model: type[Net], steps: int, each=lambda engine, step: None, **block) -> dict:
    proving.RAISES = False
    with contextlib.redirect_stderr(io.StringIO()) as said:
        engine = build(
            BY_NAME[name], 1, model=model(), kfac={**BY_NAME[name].kfac, **OFTEN, **block}
        )
        kfac, history = engine.kfac.preconditioner, []
        for step in range(steps):
            proves = kfac.capture.proof is not None
            each(engine, step)
            train(engine, 1, steps=1, first=step)
            curved = {n for n, state in kfac.state.items() if state.preconditioner is not None}
            updates = {key: float(state.updates) for key, state in kfac.curvature.factors.items()}
            history.append(
                (proves, dict(kfac.proving.unfit), curved, updates, kfac.metrics.values())
            )
    result = {
        "history": history,
        "said": said.getvalue(),
        "report": engine.kfac.report,
        "weights": weights(engine),
    }
    engine.destroy()
    return result


def worker(names: list[str]) -> dict:
    found = {}
    for name in names:
        with patch.object(proving, "EVERY", 3):
            found[name, "right"] = run(name, Net, 8)

            def helped(engine, step):
                engine.module.helped = step < 3

            found[name, "helped"] = run(name, Helped, 6, helped)
        with patch.object(proving, "EVERY", 1):
            found[name, "shared"] = run(name, Shared, 3)
        rare = {
            "factor": {**KFAC["factor"], "update_interval": 5},
            "eigenbasis": {"refresh_interval": 5},
        }
        found[name, "zero"] = run(name, Zero, 3, **rare)
    return found


def skipped_worker(_) -> list[bool]:
    """Which steps prove, if DeepSpeed skips step 1 three times."""
    engine = build(BY_NAME["z2"], 1, kfac={**BY_NAME["z2"].kfac, **OFTEN})
    kfac, proves = engine.kfac.preconditioner, []
    for step, skips in enumerate((0, 3, 0)):
        for _ in range(skips):
            proves.append(kfac.capture.proof is not None)
            for x, y in micro_batches(step, 1):
                engine.backward(engine(x, y))
            engine.kfac.job.end(applied=False)
        proves.append(kfac.capture.proof is not None)
        train(engine, 1, steps=1, first=step)
    engine.destroy()
    return proves


def test_a_skipped_step_is_none_of_those_until_the_next_proof():
    assert run_ranks("tests.step.test_proving:skipped_worker", world=1) == [
        [True, False, False, False, False, True]
    ]


NAMES = ["z0", "adam-z2", "adam-z3"]


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.step.test_proving:worker", world=2, payload=NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_proves_its_first_captured_step_and_one_of_so_many(found, name):
    for rank in found:
        proves = [step[0] for step in rank[name, "right"]["history"]]
        assert proves == [True, False, True, False, False, True, False, False]
        assert not any(step[1] for step in rank[name, "right"]["history"])
        assert "do not make up" not in rank[name, "right"]["said"]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_does_not_fit_has_no_curvature_until_it_does(found, name):
    layers = {"first", "middle", "head"}
    curved = [
        set().union(*(rank[name, "helped"]["history"][step][2] for rank in found))
        for step in range(6)
    ]
    assert curved[:3] == [layers - {"middle"}] * 3, "from the very step on in which it is found"
    assert curved[5] == layers, "and again once it fits"
    for number, rank in enumerate(found):
        history = rank[name, "helped"]["history"]
        assert [set(step[1]) for step in history] == [{"middle"}] * 3 + [set()] * 3
        assert [step[0] for step in history] == [True] * 4 + [False] * 2
        assert history[1][4]["unpreconditioned_layers"] == 1
        text = rank[name, "helped"]["report"]
        assert text.count("middle: its gradient is not that of the rows of 2 calls") == 1
        assert "test_proving.py" in text and "(mul)" in text and "linear.py" not in text, (
            "nor ZeRO-3's"
        )
        assert ("do not make up" in rank[name, "helped"]["said"]) == (number == 0), (
            "one rank says it"
        )


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_one_A_fit_in_later_proofs_whatever_their_other_sides(found, name):
    """In the first proof nobody knows yet that they share it."""
    for rank in found:
        history = rank[name, "shared"]["history"]
        assert [(step[0], step[1]) for step in history] == [(True, {})] * 3
        assert not any("wide/A" in step[3] for step in history)


@pytest.mark.parametrize("name", NAMES)
def test_layers_without_any_gradient_yet_are_captured_again_at_the_next_step(found, name):
    """Not at the next update, which is steps away: as below a head that begins with zeros."""
    updates: dict[int, dict] = {step: {} for step in range(3)}
    for rank in found:
        for step, own in updates.items():
            own |= rank[name, "zero"]["history"][step][3]
    assert {key: count for key, count in updates[0].items() if key.endswith("/A")} == {
        "first/A": 0,
        "middle/A": 0,
        "head/A": 1,
    }
    assert all(count >= 1 for count in updates[1].values()), updates[1]
    assert updates[2] == updates[1], "and then at their own interval"


def resumed_worker(folder: str) -> list:
    proving.RAISES = False
    engine = build(BY_NAME["adam-z2"], 1, kfac={**BY_NAME["adam-z2"].kfac, **OFTEN})
    train(engine, 1, steps=1)
    before = engine.kfac.preconditioner.capture.proof is not None
    engine.save_checkpoint(folder, tag="tag")
    engine.load_checkpoint(folder, tag="tag")
    dist.barrier()
    result = [before, engine.kfac.preconditioner.capture.proof is not None]
    engine.destroy()
    return result


def test_a_loaded_run_proves_again(tmp_path):
    assert (
        run_ranks("tests.step.test_proving:resumed_worker", world=2, payload=str(tmp_path))
        == [[False, True]] * 2
    )


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_layer_with_a_hook_on_its_weight_is_judged_by_the_gradient_that_the_hook_makes(factor):
    """A logger's hook on any rank changes nothing; one that scales it is named."""
    for unfit, hooked in run_ranks(
        "tests.step.test_proving:hooked_worker", world=2, payload=factor
    ):
        assert hooked == {"first": 0, "middle": 1, "head": 0}
        assert set(unfit) == (set() if factor == 1 else {"middle"})
        assert factor == 1 or "a hook on its parameters changes the gradient" in unfit["middle"]


def hooked_worker(factor: float) -> tuple:
    proving.RAISES, model = False, Net()
    if dist.get_rank() == 1:
        model.middle.weight.register_hook(
            lambda gradient: None if factor == 1 else gradient * factor
        )
    with contextlib.redirect_stderr(io.StringIO()):
        engine = build(BY_NAME["z0"], 1, model=model)
    kfac, told = engine.kfac.preconditioner, {}
    plain = kfac.proving.record
    kfac.proving.record = lambda verdict: told.update(verdict.checks) or plain(verdict)
    train(engine, 1, steps=1)
    found = dict(kfac.proving.unfit), {name: seen.hooked for name, seen in told.items()}
    engine.destroy()
    return found
