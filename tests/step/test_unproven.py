"""What is left of a layer that does not fit: nothing that rows of such a step are in. And gradients
that DeepSpeed rounds on their way fit."""

import contextlib
import io
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.model.capture import Capture
from ds_kfac.step import proving
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, train
from tests.models import CLASSES, FEATURES, Net, cross_entropy
from tests.ranks import run_ranks
from tests.step.test_proving import run

pytestmark = pytest.mark.distributed


@contextlib.contextmanager
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


class Heads(nn.Module):
    """k is called first, q is the first by name: the A of both has the name of q and the rows of
    k."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k = nn.Linear(FEATURES, 17), nn.Linear(17, 9), nn.Linear(17, 9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x, y=None):
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.k(z)) + self.q(z)
        return self.head(z) if y is None else cross_entropy(self.head(z), y)


class Pulled(Heads):
    """A third layer of the same A; a part of its gradient comes from no row where ``pull`` is not
    zero."""

    pull = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(17, 9)

    def forward(self, x, y=None):
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.k(z)) + self.q(z) * torch.sigmoid(self.v(z))
        loss = cross_entropy(self.head(z), y)
        return loss + self.pull * self.v.weight.square().sum() if self.pull else loss


class Island(Net):
    """In fp32, whatever torch_autocast says."""

    def forward(self, x, y=None):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x, y)


def history(name: str, model: type[nn.Module], layer: str, steps: int, bad: range, **block) -> list:
    """With a fault in the steps ``bad``."""
    with contextlib.ExitStack() as stack:

        def each(engine, step):
            stack.close()
            if step in bad:
                stack.enter_context(broken(layer))

        return [step[1:4] for step in run(name, model, steps, each, **block)["history"]]


def worker(_) -> dict:
    late = {"eigenbasis": {"refresh_interval": 4}}
    found = {
        name: history(name, Net, "middle", 5, range(2), **late)
        for name in ("z2", "adam-z3", "z2-offload")
    }
    with patch.object(proving, "wait", lambda proofs: 3):
        found["shared"] = history("z2", Heads, "k", 7, range(4, 5))
        late = {
            "eigenbasis": {"refresh_interval": 20},
            "factor": {**KFAC["factor"], "fisher": "activations_only"},
        }
        pulled = run(
            "adam-z2",
            Pulled,
            8,
            lambda engine, step: setattr(engine.module, "pull", float(step == 4)),
            **late,
        )
        found["one of a shared A"] = [step[1:4] for step in pulled["history"]]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.step.test_unproven:worker", world=2)


def of_all(found: list[dict], name: str) -> list[tuple[set, set, dict]]:
    """Of each step: layers that do not fit, those with curvature, updates of factors."""
    told = []
    for steps in zip(*(rank[name] for rank in found), strict=True):
        updates = {key: count for step in steps for key, count in step[2].items()}
        told.append((set(steps[0][0]), set().union(*(step[1] for step in steps)), updates))
    return told


@pytest.mark.parametrize("name", ["z2", "adam-z3", "z2-offload"])
def test_only_rows_of_steps_that_fit_are_in_the_factors_of_a_layer_that_comes_back(found, name):
    """And it comes back with the second of them, whenever the next refresh of all is."""
    steps, others = of_all(found, name), {"first", "head"}
    assert [unfit for unfit, *_ in steps] == [{"middle"}] * 2 + [set()] * 3
    assert [curved for _, curved, _ in steps] == [others] * 3 + [others | {"middle"}] * 2
    assert [(updates["middle/A"], updates["middle/G"]) for *_, updates in steps] == [
        (n, n) for n in (0, 0, 1, 2, 3)
    ]
    assert [updates["head/A"] for *_, updates in steps] == [1, 2, 3, 4, 5]


def test_layers_have_no_curvature_if_the_one_that_gave_their_common_A_does_not_fit(found):
    steps = of_all(found, "shared")
    assert [unfit for unfit, *_ in steps] == [set()] * 4 + [{"q", "k"}] + [set()] * 2
    assert steps[4][1] == {"first", "head"} and steps[4][2]["q/A"] == 0
    assert steps[6][1] == {"first", "head", "q", "k"}


def test_layers_of_one_A_lose_their_curvature_together_and_get_it_back_at_the_next_update(found):
    """Not at the next refresh, 20 steps later. Any of them may have given the rows of their A."""
    steps = of_all(found, "one of a shared A")
    assert [unfit for unfit, *_ in steps[4:6]] == [{"q", "k", "v"}, set()]
    assert steps[4][1] == {"first", "head"} and steps[7][1] == {"first", "head", "q", "k", "v"}


def saved_worker(folder: str) -> list:
    proving.RAISES = False
    block = {**KFAC, "burn_in": {"steps": 0}, "eigenbasis": {"refresh_interval": 3}}
    block |= {"factor": {**KFAC["factor"], "update_interval": 3}}
    with contextlib.redirect_stderr(io.StringIO()), broken("middle"):
        engine = build(BY_NAME["z2"], 1, kfac=block)
        train(engine, 1, steps=1)
        engine.save_checkpoint(folder, tag="tag")
        engine.load_checkpoint(folder, tag="tag")
        dist.barrier()
        train(engine, 1, steps=1, first=1)
        state = engine.kfac.preconditioner.state
        found = [name for name, own in state.items() if own.preconditioner is not None]
    engine.destroy()
    return found


def test_a_layer_that_did_not_fit_when_it_was_saved_has_no_curvature_after_loading(tmp_path):
    ranks = run_ranks("tests.step.test_unproven:saved_worker", world=2, payload=str(tmp_path))
    assert set().union(*ranks) == {"first", "head"}


def fitting_worker(_) -> dict:
    proving.RAISES, found = False, {}
    for stage in (1, 2, 3):
        for name in (f"z{stage}", f"z{stage}-autocast_bfloat16"):
            mode, told = replace(BY_NAME[name], clip=0.0), dict[str, float]()
            with contextlib.redirect_stderr(io.StringIO()):
                engine = build(mode, 2, model=Island() if "autocast" in name else Net())
            plain = engine.kfac.preconditioner.proving.record
            engine.kfac.preconditioner.proving.record = lambda verdict, told=told, plain=plain: (
                told.update({name: seen.ratio for name, seen in verdict.checks.items()})
                or plain(verdict)
            )
            if "autocast" not in name:
                engine.module.first.bias.requires_grad_(False)
            train(engine, 2, steps=1)
            found[name] = told
            engine.destroy()
    return found


def test_layers_fit_whose_gradients_are_sent_in_16_bits_or_whose_bias_is_frozen_since_attach():
    """torch_autocast sends the gradient of a Linear in 16 bits, also where the model runs it in
    fp32."""
    for rank in run_ranks("tests.step.test_unproven:fitting_worker", world=2):
        assert len(rank) == 6
        for name, told in rank.items():
            assert told.keys() == {"first", "middle", "head"} and max(told.values()) < 0.5, (
                name,
                told,
            )
