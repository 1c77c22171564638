"""Legal programs that do not call a model the same way in every step."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, difference, micro_batches, reference, weights
from tests.models import Net, Stoppable, cross_entropy, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS, EVENT = 6, 4
"""In step EVENT something else happens."""


def run_step(engine, step: int, program: str, event: bool) -> None:
    x, y = next(iter(micro_batches(step, 1)))
    other, _ = next(iter(micro_batches(step + 100, 1)))
    if event and program == "skipped":
        assert torch.isnan(engine(other * float("nan"), y))
    elif event and program == "second forward":
        engine(other, y)
    elif event and program == "no step":
        with engine.no_sync():
            engine.backward(engine(other, y))
    elif event and program == "stopped":
        engine.module.stops = True
        with pytest.raises(FloatingPointError):
            engine.backward(engine(x, y))
        engine.module.stops = False
        engine.zero_grad()
    elif event and program == "accumulation":
        engine.backward(engine(x, y))
        engine.set_train_batch_size(2 * engine.train_batch_size())
        engine.step()  # no longer the boundary
    loss = engine(x, y)
    if event and program == "second forward":
        engine(other, y)
    engine.backward(loss)
    engine.step()
    if event and program == "accumulation":
        assert engine.global_steps == step + 1
        engine.set_train_batch_size(engine.train_batch_size() // 2)


def programs_worker(cases) -> dict:
    results, world, rank = {}, dist.get_world_size(), dist.get_rank()
    for name, program, who in cases:
        engine = build(BY_NAME[name], 1, model=make_net(Stoppable))
        initial = weights(engine)
        for step in range(STEPS):
            run_step(engine, step, program, step == EVENT and rank in who)
        final = weights(engine)
        results[name, program, who] = {
            "difference": difference(final, reference(BY_NAME[name], 1, world, initial, steps=STEPS), initial),
            "weights": final,
            "steps": engine.kfac.preconditioner.steps,
        }
        engine.destroy()
    return results


PROGRAMS = [
    ("z0", "skipped", (0,)),
    ("z2", "skipped", (0, 1)),
    ("z0", "second forward", (1,)),
    ("z2", "second forward", (0, 1)),
    ("z0", "stopped", (0,)),
    ("z0", "stopped", (0, 1)),
    ("z0", "no step", (1,)),
    ("z0", "no step", (0, 1)),
    ("z2", "accumulation", (0, 1)),
    ("z0", "accumulation", (0, 1)),
]


def test_programs_that_change_their_calls_run():
    both = run_ranks("tests.deepspeed.test_programs:programs_worker", world=2, payload=PROGRAMS)
    for case in PROGRAMS:
        _, program, _ = case
        for results in both:
            result = results[case]
            assert result["steps"] == STEPS and torch.isfinite(torch.tensor(result["difference"])), (case, result)
            for name, weight in result["weights"].items():
                assert torch.equal(weight, both[0][case]["weights"][name]), (case, "ranks differ in", name)
            if program in ("skipped", "second forward"):  # a forward without backward adds nothing
                assert result["difference"] <= 1e-5, (case, result["difference"])


# layers that part


class Attention(Net):
    """Projections of one input; at some step one of them gets an input of its own."""

    parted = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(17, 17, bias=False) for _ in range(3))
        self.gate, self.up = nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        z = z + self.q(z).softmax(-1) * self.k(2.0 * z if self.parted else z) + self.v(z)
        z = z + torch.tanh(self.gate(z)) * self.up(z)
        return cross_entropy(self.head(torch.tanh(self.middle(z))), y)


def parting_worker(cases) -> dict:
    results, rank = {}, dist.get_rank()
    for name, interval, who in cases:
        block = {"factor": {"update_interval": interval}, "eigenbasis": {"refresh_interval": interval}}
        mode = BY_NAME[name]
        mode = Mode(name, mode.stage, kfac={**block, "burn_in": {"steps": 0}})
        engine, history = build(mode, 1, model=make_net(Attention)), []
        kfac = engine.kfac.preconditioner
        common = []
        for step in range(4 * interval + 2):
            engine.module.parted = step >= 2 * interval and rank in who
            x, y = next(iter(micro_batches(step, 1)))
            before = kfac.channel.calls.copy()
            with contextlib.redirect_stderr(io.StringIO()):
                engine.backward(engine(x, y))
                engine.step()
            calls = sum((kfac.channel.calls - before).values())
            factors = {key: state.factor.packed_P.clone() for key, state in kfac.curvature.factors.items()}
            updates = {key: float(state.factor.updates) for key, state in kfac.curvature.factors.items()}
            history.append((kfac.known.groups, calls, factors, updates))
            if len(history) > 1 and history[-2][0] != kfac.known.groups:
                common.append(step)
        results[name, interval, who] = history, common
        engine.destroy()
    return results


PARTINGS = [("z0", 2, (1,)), ("z2", 2, (0, 1)), ("z2", 1, (0,)), ("z3", 3, (1,))]


def test_layers_that_part_get_factors_of_their_own_that_start_as_the_common_one():
    both = run_ranks("tests.deepspeed.test_programs:parting_worker", world=2, payload=PARTINGS)
    for case in PARTINGS:
        _, interval, who = case
        (zero, changes), (one, other_changes) = (results[case] for results in both)
        seen = (
            2 * interval
        )  # the capture in which it was seen; at interval 1 the next one is under way before it is read
        parted = seen + max(interval, 2) - 1
        assert changes == other_changes == [parted], (case, changes)
        for step, (mine, theirs) in enumerate(zip(zero, one, strict=True)):
            assert mine[0] == theirs[0] and mine[1] == theirs[1], "the same groups and collectives on all ranks"
            expected = (("gate", "up"), ("q", "k", "v")) if step < parted else (("gate", "up"),)
            assert mine[0] is None or set(mine[0]) == set(expected), (case, step, mine[0])
        merged = [(step[0], mine[2] | theirs[2], mine[3] | theirs[3]) for step, (mine, theirs) in
                  enumerate(zip(zero, one, strict=True)) for step in [mine]]  # fmt: skip
        for name in "qkv":
            assert torch.equal(merged[parted][1][f"{name}/A"], merged[parted - 1][1]["q/A"]), "the common one"
            assert merged[parted][2][f"{name}/A"] == merged[parted - 1][2]["q/A"]
        left_out = len(who) == 2
        assert torch.equal(merged[parted - 1][1]["q/A"], merged[seen - 1][1]["q/A"]) == left_out, "else of the others"
        last = merged[-1][1]
        assert torch.equal(last["q/A"], last["v/A"]) and not torch.equal(last["q/A"], last["k/A"]), case
        assert merged[-1][2]["k/A"] > merged[parted][2]["k/A"], "captured again, on its own"
        assert merged[parted][2]["q/G"] > merged[seen - 1][2]["q/G"], "only what is common was left out"


def features_worker(payload) -> dict:
    """Parting with everything that keeps state per factor; saved and resumed after it."""
    folder, features = payload
    results = {}
    for name, (stage, extra) in features.items():
        block = {"factor": {"update_interval": 1, "decay": 0.9, "fisher": "empirical"}, "burn_in": {"steps": 0}}
        mode = Mode(name, stage, kfac={**block, "eigenbasis": {"refresh_interval": 2}, **extra})
        engine = build(mode, 1, model=make_net(Attention))

        def train(engine, steps: range) -> None:
            engine.module.parted = True
            for step in steps:
                x, y = next(iter(micro_batches(step, 1)))
                if step < 2:
                    engine.module.parted = False
                engine.backward(engine(x, y))
                engine.step()
                engine.module.parted = True

        train(engine, range(6))
        path = f"{folder}/{name}"
        engine.save_checkpoint(path, "tag")
        resumed = build(mode, 1, model=make_net(Attention, seed=1))
        resumed.load_checkpoint(path, "tag")
        groups = engine.kfac.preconditioner.known.groups, resumed.kfac.preconditioner.known.groups
        for one in (engine, resumed):
            train(one, range(6, 9))
        states = engine.kfac.preconditioner.curvature.factors
        results[name] = {
            "groups": groups,
            "weights": (weights(engine), weights(resumed)),
            "updates": {key: float(state.factor.updates) for key, state in states.items()},
        }
        for one in (engine, resumed):
            one.destroy()
    return results


FEATURES = {
    "plain": (2, {}),
    "adaptive": (2, {"adaptive": {"enabled": True, "tolerance": 1e-6}}),
    "lag": (2, {"eigenbasis": {"refresh_interval": 4, "lag": 1}}),
    "inverse": (3, {"preconditioner": {"method": "inverse"}, "damping": {"kind": "relative", "value": 0.3}}),
    "every worker": (0, {"assignment": {"gradient_worker_fraction": 1.0}}),
    "offload": (2, {"offload": {"device": "cpu"}}),
}


def test_parting_with_every_kind_of_factor_state_and_resuming_after_it(tmp_path):
    payload = str(tmp_path), FEATURES
    both = run_ranks("tests.deepspeed.test_programs:features_worker", world=2, payload=payload)
    for name in FEATURES:
        results = [ranks[name] for ranks in both]
        updates = results[0]["updates"] | results[1]["updates"]
        assert {"q/A", "k/A", "v/A", "gate/A"} <= updates.keys() and "up/A" not in updates
        # seen in step 2 by both ranks, left out in step 3, of their own from step 4 on
        assert updates["q/A"] == updates["k/A"] == updates["v/A"] == 7 < updates["first/A"] == 9, (name, updates)
        for result in results:
            assert result["groups"] == ((("gate", "up"),), (("gate", "up"),)), (name, result["groups"])
            for parameter, weight in result["weights"][0].items():
                assert torch.isfinite(weight).all()
                assert torch.equal(weight, results[0]["weights"][0][parameter]), (name, "ranks differ", parameter)
                assert torch.equal(weight, result["weights"][1][parameter]), (name, "resumed differently", parameter)


# two engines


def adversaries_worker(names: list[str]) -> dict:
    """A discriminator's factors after three steps, with and without a generator's loss through it."""
    results = {}
    still = {"type": "SGD", "params": {"lr": 1e-30}}  # DeepSpeed leaves the generator's gradients in the discriminator
    for name in names:
        for through in (True, False):
            discriminator = build(BY_NAME[name], 1, optimizer=still)
            generator = build(BY_NAME[name], 1, model=make_net(Generator))
            kfac, strangers = discriminator.kfac.preconditioner, []
            # DeepSpeed refuses at stage 0 what it takes for a loss.backward() of the discriminator
            judge = discriminator if name != "z0" else discriminator.module
            for step in range(3):
                x, y = next(iter(micro_batches(step, 1)))
                if through:
                    generator.backward(cross_entropy(judge(generator(x)), y))
                    generator.step()
                strangers.append(kfac.capture.strangers)
                discriminator.backward(discriminator(x, y))
                discriminator.step()
            results[name, through] = (
                strangers,
                {
                    key: (state.factor.packed_P, float(state.factor.updates))
                    for key, state in kfac.curvature.factors.items()
                },
            )
            generator.destroy()
            discriminator.destroy()
    return results


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(13, 11), nn.Linear(11, 13)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))


def test_a_generator_s_loss_leaves_the_discriminator_s_factors_alone():
    names = ["z0", "z2"]
    results = run_ranks("tests.deepspeed.test_programs:adversaries_worker", world=1, payload=names)[0]
    for name in names:
        (none, alone), (calls, through) = results[name, False], results[name, True]
        assert none == [0, 0, 0] and calls == [3, 3, 3], "a call of each layer is passed over"
        assert alone.keys() == through.keys() and len(alone) == 6
        for key, (factor, updates) in alone.items():
            assert updates == 3 == through[key][1] and torch.equal(through[key][0], factor), key
