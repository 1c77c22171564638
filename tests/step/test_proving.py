"""What a run does with the proof that rows make up gradients: when it proves, what is left of a
layer that does not fit, when it comes back, and what fits though it is rounded on its way."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.model.capture import Capture
from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, train
from tests.deepspeed.said import heard
from tests.models import CLASSES, FEATURES, Net, cross_entropy
from tests.ranks import of_ranks

OFTEN = {**KFAC, "eigenbasis": {"refresh_interval": 1}, "burn_in": {"steps": 0}}
ALL_MODES = ["z0", "z2-offload", "adam-z3"]


def rare(interval: int) -> dict:
    """So many steps between updates, and refreshes."""
    factor = {**KFAC["factor"], "update_interval": interval}
    return {"factor": factor, "eigenbasis": {"refresh_interval": interval}}


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


class Heads(nn.Module):
    """k is called first, but one A of all three has the name of q, the first by name, and the rows
    of k, which alone would have one probe. A part of v's gradient comes from no row where ``pull``
    is not zero."""

    pull = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 40)
        self.q, self.k, self.v = (nn.Linear(40, width) for width in (40, 3, 40))
        self.head = nn.Linear(40, CLASSES)

    def forward(self, x, y):
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.k(z)).mean(-1, keepdim=True) + self.q(z) * torch.sigmoid(self.v(z))
        loss = cross_entropy(self.head(z), y)
        return loss + self.pull * self.v.weight.square().sum() if self.pull else loss


@contextmanager
def broken(layer: str):
    """Of one rank's calls of a layer one row is lost."""
    plain = Capture._called

    def called(self, calls, x, output):
        if calls[0].layer.name == layer and dist.get_rank() == 1:
            x = x.detach().clone()
            x.view(-1, x.shape[-1])[0] = 0
        return plain(self, calls, x, output)

    with patch.object(Capture, "_called", called):
        yield


def curved(engine) -> set[str]:
    """Layers of which some rank has curvature. Collective."""
    state = engine.kfac.preconditioner.state
    own = {name for name, of_layer in state.items() if of_layer.preconditioner is not None}
    return set().union(*of_ranks(own))


@dataclass(frozen=True)
class Seen:
    """A step: whether it proves, layers that do not fit after it, layers with curvature, and
    updates of all factors."""

    proves: bool
    unfit: set[str]
    curved: set[str]
    updates: dict[str, float]


def run(
    name: str,
    model: type[nn.Module],
    steps: int,
    each=lambda engine, step: None,
    *,
    every: int = 0,
    loses: tuple[str, range] = ("", range(0)),
    **block,
):
    """The engine after some steps, and what was seen in each.

    Args:
        each: called before every step.
        every: steps between two proofs; 0: as a user's run.
        loses: a layer of which a row is lost, and in which steps.
    """
    proving.RAISES = False
    waits = patch.object(proving, "wait", lambda proofs: every) if every else nullcontext()
    engine = build(BY_NAME[name], 1, model=model(), kfac={**BY_NAME[name].kfac, **OFTEN, **block})
    kfac, seen = engine.kfac.preconditioner, []
    for step in range(steps):
        proves = kfac.capture.proof is not None
        each(engine, step)
        with broken(loses[0]) if step in loses[1] else nullcontext(), waits:
            train(engine, 1, steps=1, first=step)
        own = {key: float(state.updates) for key, state in kfac.curvature.factors.items()}
        updates = {key: count for of_rank in of_ranks(own) for key, count in of_rank.items()}
        seen.append(Seen(proves, set(kfac.proving.unfit), curved(engine), updates))
    return engine, seen


def unfit(seen: list[Seen]) -> list[set[str]]:
    return [step.unfit for step in seen]


def a_run_proves_its_first_captured_step_and_one_of_so_many(name):
    with patch.object(proving, "EVERY", 3), heard() as said:
        _, seen = run(name, Net, 8)
    assert [step.proves for step in seen] == [i in (0, 2, 5) for i in range(8)]
    assert not any(unfit(seen)) and not any("do not make up" in text for text in said)


def a_layer_that_does_not_fit_has_no_curvature_until_it_does(name):
    numbers = []

    def helped(engine, step):
        engine.module.helped = step < 3
        numbers.append(engine.kfac.counters()["unpreconditioned_layers"])

    with patch.object(proving, "EVERY", 3), heard() as said:
        engine, seen = run(name, Helped, 6, helped)
    assert [step.curved for step in seen[:3]] == [{"first", "head"}] * 3, "from step 0 on"
    assert seen[5].curved == {"first", "middle", "head"}, "and again once it fits"
    assert unfit(seen) == [{"middle"}] * 3 + [set()] * 3
    assert [step.proves for step in seen] == [True] * 4 + [False] * 2 and numbers[2] == 1
    report = engine.kfac.report
    assert report.count("middle: its gradient is not the sum over the rows of the 2 calls") == 1
    assert "test_proving.py" in report and "(mul)" in report and "linear.py" not in report
    told = any("do not make up" in text for text in said)
    assert told == (dist.get_rank() == 0), "one rank says it"


def layers_without_any_gradient_yet_are_captured_again_at_the_next_step(name):
    """Not at the next update, which is steps away: as below a head that begins with zeros."""
    _, seen = run(name, Zero, 3, **rare(5))
    first, second, third = (step.updates for step in seen)
    counts = {key: count for key, count in first.items() if key.endswith("/A")}
    assert counts == {"first/A": 0, "middle/A": 0, "head/A": 1}
    assert all(count >= 1 for count in second.values()), second
    assert third == second, "and then at their own interval"


def only_rows_of_steps_that_fit_are_in_the_factors_of_a_layer_that_comes_back(name):
    """And it comes back with the second of them, whenever the next refresh of all is."""
    lost = {"loses": ("middle", range(2)), "eigenbasis": {"refresh_interval": 4}}
    _, seen = run(name, Net, 5, **lost)
    others = {"first", "head"}
    assert unfit(seen) == [{"middle"}] * 2 + [set()] * 3
    assert [step.curved for step in seen] == [others] * 3 + [others | {"middle"}] * 2
    for side in "AG":
        assert [step.updates[f"middle/{side}"] for step in seen] == [0, 0, 1, 2, 3]
    assert [step.updates["head/A"] for step in seen] == [1, 2, 3, 4, 5]


def layers_of_one_A_lose_their_curvature_together_and_get_it_back_at_the_next_update(name):
    """Not at the next refresh, 20 steps later. Any of them may have given the rows of their A, and
    one did: k, or v whose gradient does not fit."""

    def pulled(engine, step):
        engine.module.pull = float(step == 4 and not lost)

    late = {
        "eigenbasis": {"refresh_interval": 20},
        "factor": {**KFAC["factor"], "fisher": "activations_only"},
    }
    for lost in ("", "k"):
        _, seen = run(name, Heads, 8, pulled, every=3, loses=(lost, range(4, 5)), **late)
        assert unfit(seen[3:6]) == [set(), {"q", "k", "v"}, set()], lost
        assert seen[4].curved == {"first", "head"}
        assert seen[7].curved == {"first", "head", "q", "k", "v"}


PROMISES = {
    a_run_proves_its_first_captured_step_and_one_of_so_many: ALL_MODES,
    a_layer_that_does_not_fit_has_no_curvature_until_it_does: ALL_MODES,
    layers_without_any_gradient_yet_are_captured_again_at_the_next_step: ["z0", "adam-z3"],
    only_rows_of_steps_that_fit_are_in_the_factors_of_a_layer_that_comes_back: ALL_MODES,
    layers_of_one_A_lose_their_curvature_together_and_get_it_back_at_the_next_update: ["adam-z2"],
}
"""Promise -> modes in which it is held; all in one spawn."""
CASES = [(promise, name) for promise, names in PROMISES.items() for name in names]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("promise", "name"), CASES)
def test_of_a_run_and_its_proofs(promise, name):
    promise(name)


@pytest.mark.ranks(1)
def test_a_skipped_step_is_none_of_those_until_the_next_proof():
    """DeepSpeed skips step 1 three times."""
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
    assert proves == [True, False, False, False, False, True]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fits", [True, False])
def test_a_loaded_run_proves_again_and_a_layer_that_did_not_fit_has_no_curvature(fits, tmp_path):
    proving.RAISES = False
    engine = build(BY_NAME["z2"], 1, kfac={**OFTEN, **({} if fits else rare(3))})
    kfac = engine.kfac.preconditioner
    with nullcontext() if fits else broken("middle"):
        train(engine, 1, steps=1)
        proves = [kfac.capture.proof is not None]
        engine.save_checkpoint(str(tmp_path), tag="tag")
        engine.load_checkpoint(str(tmp_path), tag="tag")
        proves.append(kfac.capture.proof is not None)
        train(engine, 1, steps=1, first=1)
    assert proves == [False, fits]
    assert curved(engine) == {"first", "head"} | ({"middle"} if fits else set())


class Island(Net):
    """In fp32, whatever torch_autocast says."""

    def forward(self, x, y=None):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x, y)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["z1", "z3", "z1-autocast_bfloat16", "z3-autocast_bfloat16"])
def test_layers_fit_whose_gradients_are_sent_in_16_bits_or_whose_bias_is_frozen_since_attach(name):
    """torch_autocast sends the gradient of a Linear in 16 bits, also where the model runs it in
    fp32. A layer that does not fit raises in tests."""
    in_16_bits = "autocast" in name
    engine = build(replace(BY_NAME[name], clip=0.0), 2, model=Island() if in_16_bits else Net())
    engine.module.first.bias.requires_grad_(in_16_bits)
    train(engine, 2, steps=1)
    assert engine.kfac.counters()["factor_updates"]
