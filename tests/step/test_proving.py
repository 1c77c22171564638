"""What a run does with the proof that rows make up gradients: when it proves, what is left of a
layer that does not fit, when it comes back, and what fits though it is rounded on its way."""

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
from tests.deepspeed.runs import build, micro_batches, train
from tests.models import CLASSES, FEATURES, Net, cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
OFTEN = {**KFAC, "eigenbasis": {"refresh_interval": 1}, "burn_in": {"steps": 0}}
NAMES = ["z0", "adam-z2", "adam-z3"]
BROKEN = ["z2", "adam-z3", "z2-offload"]


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


class Heads(nn.Module):
    """k is called first, q is the first by name: the A of both has the name of q and the rows of
    k."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k = nn.Linear(FEATURES, 17), nn.Linear(17, 9), nn.Linear(17, 9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x, y):
        z = torch.tanh(self.first(x))
        return cross_entropy(self.head(torch.tanh(self.k(z)) + self.q(z)), y)


class Pulled(Heads):
    """A third layer of the same A; a part of its gradient comes from no row where ``pull`` is not
    zero."""

    pull = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(17, 9)

    def forward(self, x, y):
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.k(z)) + self.q(z) * torch.sigmoid(self.v(z))
        loss = cross_entropy(self.head(z), y)
        return loss + self.pull * self.v.weight.square().sum() if self.pull else loss


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


def curved(engine) -> set[str]:
    """Layers of which this rank has curvature."""
    state = engine.kfac.preconditioner.state
    return {name for name, own in state.items() if own.preconditioner is not None}


def run(
    name: str,
    model: type[nn.Module],
    steps: int,
    each=lambda engine, step: None,
    *,
    loses: tuple[str, range] = ("", range(0)),
    **block,
) -> dict:
    """What a rank sees after every step, and what was said.

    Args:
        loses: a layer of which a row is lost, and in which steps.
    """
    proving.RAISES = False
    with contextlib.redirect_stderr(io.StringIO()) as said:
        kfac_block = {**BY_NAME[name].kfac, **OFTEN, **block}
        engine = build(BY_NAME[name], 1, model=model(), kfac=kfac_block)
        kfac, history = engine.kfac.preconditioner, []
        for step in range(steps):
            proves = kfac.capture.proof is not None
            each(engine, step)
            fault = broken(loses[0]) if step in loses[1] else contextlib.nullcontext()
            with fault:
                train(engine, 1, steps=1, first=step)
            updates = {key: float(state.updates) for key, state in kfac.curvature.factors.items()}
            unfit, numbers = dict(kfac.proving.unfit), kfac.metrics.values()
            history.append((proves, unfit, curved(engine), updates, numbers))
    report = engine.kfac.report
    engine.destroy()
    return {"history": history, "said": said.getvalue(), "report": report}


def worker(_) -> dict:
    found = {}
    rare = {
        "factor": {**KFAC["factor"], "update_interval": 5},
        "eigenbasis": {"refresh_interval": 5},
    }

    def helped(engine, step):
        engine.module.helped = step < 3

    def pulled(engine, step):
        engine.module.pull = float(step == 4)

    for name in NAMES:
        with patch.object(proving, "EVERY", 3):
            found[name, "right"] = run(name, Net, 8)
            found[name, "helped"] = run(name, Helped, 6, helped)
        with patch.object(proving, "EVERY", 1):
            found[name, "shared"] = run(name, Shared, 3)
        found[name, "zero"] = run(name, Zero, 3, **rare)
    for name in BROKEN:
        late = {"eigenbasis": {"refresh_interval": 4}}
        found[name, "broken"] = run(name, Net, 5, loses=("middle", range(2)), **late)
    with patch.object(proving, "wait", lambda proofs: 3):
        found["shared A"] = run("z2", Heads, 7, loses=("k", range(4, 5)))
        late = {
            "eigenbasis": {"refresh_interval": 20},
            "factor": {**KFAC["factor"], "fisher": "activations_only"},
        }
        found["one of a shared A"] = run("adam-z2", Pulled, 8, pulled, **late)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.step.test_proving:worker", world=2)


def of_all(found: list[dict], case) -> list[tuple[set, set, dict]]:
    """Of each step: layers that do not fit, those with curvature on some rank, updates of
    factors."""
    told = []
    for steps in zip(*(rank[case]["history"] for rank in found), strict=True):
        updates = {key: count for step in steps for key, count in step[3].items()}
        told.append((set(steps[0][1]), set().union(*(step[2] for step in steps)), updates))
    return told


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
    steps = of_all(found, (name, "helped"))
    assert [of_step[1] for of_step in steps[:3]] == [layers - {"middle"}] * 3, "from step 0 on"
    assert steps[5][1] == layers, "and again once it fits"
    for number, rank in enumerate(found):
        history = rank[name, "helped"]["history"]
        assert [set(step[1]) for step in history] == [{"middle"}] * 3 + [set()] * 3
        assert [step[0] for step in history] == [True] * 4 + [False] * 2
        assert history[1][4]["unpreconditioned_layers"] == 1
        text = rank[name, "helped"]["report"]
        assert text.count("middle: its gradient is not that of the rows of 2 calls") == 1
        assert "test_proving.py" in text and "(mul)" in text and "linear.py" not in text
        said = "do not make up" in rank[name, "helped"]["said"]
        assert said == (number == 0), "one rank says it"


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
    first, second, third = (updates for *_, updates in of_all(found, (name, "zero")))
    counts = {key: count for key, count in first.items() if key.endswith("/A")}
    assert counts == {"first/A": 0, "middle/A": 0, "head/A": 1}
    assert all(count >= 1 for count in second.values()), second
    assert third == second, "and then at their own interval"


@pytest.mark.parametrize("name", BROKEN)
def test_only_rows_of_steps_that_fit_are_in_the_factors_of_a_layer_that_comes_back(found, name):
    """And it comes back with the second of them, whenever the next refresh of all is."""
    steps, others = of_all(found, (name, "broken")), {"first", "head"}
    assert [unfit for unfit, *_ in steps] == [{"middle"}] * 2 + [set()] * 3
    assert [curved for _, curved, _ in steps] == [others] * 3 + [others | {"middle"}] * 2
    counts = [(updates["middle/A"], updates["middle/G"]) for *_, updates in steps]
    assert counts == [(n, n) for n in (0, 0, 1, 2, 3)]
    assert [updates["head/A"] for *_, updates in steps] == [1, 2, 3, 4, 5]


def test_layers_have_no_curvature_if_the_one_that_gave_their_common_A_does_not_fit(found):
    steps = of_all(found, "shared A")
    assert [unfit for unfit, *_ in steps] == [set()] * 4 + [{"q", "k"}] + [set()] * 2
    assert steps[4][1] == {"first", "head"} and steps[4][2]["q/A"] == 0
    assert steps[6][1] == {"first", "head", "q", "k"}


def test_layers_of_one_A_lose_their_curvature_together_and_get_it_back_at_the_next_update(found):
    """Not at the next refresh, 20 steps later. Any of them may have given the rows of their A."""
    steps = of_all(found, "one of a shared A")
    assert [unfit for unfit, *_ in steps[4:6]] == [{"q", "k", "v"}, set()]
    assert steps[4][1] == {"first", "head"} and steps[7][1] == {"first", "head", "q", "k", "v"}


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
    (proves,) = run_ranks("tests.step.test_proving:skipped_worker", world=1)
    assert proves == [True, False, False, False, False, True]


def reloaded(folder: str, **block) -> tuple[list[bool], set[str]]:
    """Whether a run proves before and after loading a checkpoint of its first step; layers with
    curvature after a second one."""
    proving.RAISES = False
    with contextlib.redirect_stderr(io.StringIO()):
        engine = build(BY_NAME["z2"], 1, kfac={**OFTEN, **block})
        train(engine, 1, steps=1)
        proves = [engine.kfac.preconditioner.capture.proof is not None]
        engine.save_checkpoint(folder, tag="tag")
        engine.load_checkpoint(folder, tag="tag")
        dist.barrier()
        proves.append(engine.kfac.preconditioner.capture.proof is not None)
        train(engine, 1, steps=1, first=1)
        found = curved(engine)
    engine.destroy()
    return proves, found


def saved_worker(folder: str) -> tuple[list[bool], set[str]]:
    proves, _ = reloaded(f"{folder}/fits")
    rare = {
        "factor": {**KFAC["factor"], "update_interval": 3},
        "eigenbasis": {"refresh_interval": 3},
    }
    with broken("middle"):
        _, found = reloaded(f"{folder}/does not fit", **rare)
    return proves, found


def test_a_loaded_run_proves_again_and_a_layer_that_did_not_fit_has_no_curvature(tmp_path):
    ranks = run_ranks("tests.step.test_proving:saved_worker", world=2, payload=str(tmp_path))
    assert [proves for proves, _ in ranks] == [[False, True]] * 2
    assert set().union(*(found for _, found in ranks)) == {"first", "head"}


class Island(Net):
    """In fp32, whatever torch_autocast says."""

    def forward(self, x, y=None):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x, y)


@pytest.mark.ranks(2)
def test_layers_fit_whose_gradients_are_sent_in_16_bits_or_whose_bias_is_frozen_since_attach():
    """torch_autocast sends the gradient of a Linear in 16 bits, also where the model runs it in
    fp32. A layer that does not fit raises in tests."""
    for stage in (1, 2, 3):
        for name, model in ((f"z{stage}", Net()), (f"z{stage}-autocast_bfloat16", Island())):
            engine = build(replace(BY_NAME[name], clip=0.0), 2, model=model)
            model.first.bias.requires_grad_(isinstance(model, Island))
            train(engine, 2, steps=1)
            kfac = engine.kfac.preconditioner
            assert kfac.proving.unfit == {} and kfac.metrics.values()["factor_updates"], name
            engine.destroy()
