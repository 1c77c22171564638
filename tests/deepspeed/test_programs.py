"""Legal programs that do not call a model the same way in every step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.close import close
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, difference, micro_batches, reference, train, weights
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
            "difference": difference(
                final, reference(BY_NAME[name], 1, world, initial, steps=STEPS), initial
            ),
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
            assert result["steps"] == STEPS and torch.isfinite(
                torch.tensor(result["difference"])
            ), (case, result)
            for name, weight in result["weights"].items():
                assert torch.equal(weight, both[0][case]["weights"][name]), (
                    case,
                    "ranks differ in",
                    name,
                )
            if program in ("skipped", "second forward"):  # a forward without backward adds nothing
                assert result["difference"] <= 1e-5, (case, result["difference"])


# layers that share an input, and at some step do not


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
        block = {
            "factor": {"update_interval": interval},
            "eigenbasis": {"refresh_interval": interval},
        }
        mode = Mode(name, BY_NAME[name].stage, kfac={**block, "burn_in": {"steps": 0}})
        engine, history = build(mode, 1, model=make_net(Attention)), []
        kfac = engine.kfac.preconditioner
        for step in range(4 * interval):
            engine.module.parted = 2 * interval <= step < 3 * interval and rank in who
            x, y = next(iter(micro_batches(step, 1)))
            before = kfac.channel.calls.copy()
            engine.backward(engine(x, y))
            engine.step()
            calls = sum((kfac.channel.calls - before).values())
            factors = {key: state.packed_P.clone() for key, state in kfac.curvature.factors.items()}
            history.append((kfac.observations.groups, calls, factors))
        results[name, interval, who] = history
        engine.destroy()
    return results


PARTINGS = [("z0", 2, (1,)), ("z2", 2, (0, 1)), ("z2", 1, (0,)), ("z3", 3, (1,))]


def test_layers_of_a_group_may_have_different_inputs_in_a_step_on_some_ranks():
    both = run_ranks("tests.deepspeed.test_programs:parting_worker", world=2, payload=PARTINGS)
    for case in PARTINGS:
        _, interval, _ = case
        histories = [ranks[case] for ranks in both]
        merged = []
        for step, (mine, theirs) in enumerate(zip(*histories, strict=True)):
            assert mine[:2] == theirs[:2], "the same groups and collectives on all ranks"
            assert set(mine[0]) == {("gate", "up"), ("q", "k", "v")}, (case, step, mine[0])
            merged.append(mine[2] | theirs[2])
        before, parted, after = (merged[index * interval - 1] for index in (2, 3, 4))
        for key in ("q/A", "q/G", "gate/A"):
            assert not torch.equal(before[key], parted[key]) and not torch.equal(
                parted[key], after[key]
            ), key


class OftenOrNever(Attention):
    """From some step on its first projection is used no more, or twice, the second time with
    another input."""

    calls = 1

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        own = [self.q(part) for part in (z, 2.0 * z)[: self.calls]]
        return cross_entropy(
            self.head(torch.tanh(self.middle(z + self.k(z).softmax(-1) * self.v(z) + sum(own)))), y
        )


def calls_worker(cases) -> dict:
    """The common A before and after a step with so many calls, and how often it was averaged.
    Weights stand still, so that inputs do not depend on calls."""
    found, still = {}, {"type": "SGD", "params": {"lr": 1e-30}}
    block = {
        "factor": {"update_interval": 1},
        "eigenbasis": {"refresh_interval": 1},
        "burn_in": {"steps": 0},
    }
    for name, calls in cases:
        mode = Mode(name, BY_NAME[name].stage, kfac=block)
        engine = build(mode, 1, model=make_net(OftenOrNever), optimizer=still)
        kfac, history = engine.kfac.preconditioner, []
        for step in range(3):
            engine.module.calls = calls if step == 2 else 1
            train(engine, 1, steps=1, first=step)
            factor = kfac.curvature.factors["q/A"]
            history.append((factor.packed_P.clone(), float(factor.updates)))
        assert ("q", "k", "v") in kfac.observations.groups
        found[name, calls] = history[1:]
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def of_calls() -> dict:
    cases = [(name, calls) for name in ("z0", "z2") for calls in (0, 1, 2)]
    return run_ranks("tests.deepspeed.test_programs:calls_worker", world=1, payload=cases)[0]


@pytest.mark.parametrize("name", ["z0", "z2"])
def test_a_group_whose_first_layer_is_used_no_more_has_the_rows_of_another_one(of_calls, name):
    _, (A, updates) = of_calls[name, 0]
    _, (expected, often) = of_calls[name, 1]
    assert updates == often
    close(A, expected, sums=100)


@pytest.mark.parametrize("name", ["z0", "z2"])
def test_a_group_one_of_whose_layers_has_another_input_too_has_the_rows_of_both(of_calls, name):
    """The third batch has the rows of z and of 2 z, so the mean of their squares is 2.5 times as
    large."""
    (before, _), (of_one, _) = of_calls[name, 1]
    _, (of_both, updates) = of_calls[name, 2]
    batch = 3 * of_one - 2 * before
    assert updates == 3
    close(of_both, (2 * before + 2.5 * batch) / 3, sums=100, condition=4)


@pytest.mark.parametrize("name", ["z0", "z2"])
def test_a_group_that_holds_is_averaged_in_every_step(of_calls, name):
    (before, _), (after, updates) = of_calls[name, 1]
    assert not torch.equal(before, after) and updates == 3


# two engines


def adversaries_worker(names: list[str]) -> dict:
    """A discriminator's factors after three steps, with and without a generator's loss through
    it."""
    results = {}
    # DeepSpeed leaves the generator's gradients in the discriminator
    still = {"type": "SGD", "params": {"lr": 1e-30}}
    for name in names:
        for through in (True, False):
            discriminator = build(BY_NAME[name], 1, optimizer=still)
            generator = build(BY_NAME[name], 1, model=make_net(Generator))
            kfac, outside = discriminator.kfac.preconditioner, []
            # DeepSpeed refuses at stage 0 what it takes for a loss.backward() of the discriminator
            judge = discriminator if name != "z0" else discriminator.module
            for step in range(3):
                x, y = next(iter(micro_batches(step, 1)))
                if through:
                    generator.backward(cross_entropy(judge(generator(x)), y))
                    generator.step()
                outside.append(kfac.capture.outside)
                discriminator.backward(discriminator(x, y))
                discriminator.step()
            results[name, through] = (
                outside,
                {
                    key: (state.packed_P, float(state.updates))
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
    results = run_ranks("tests.deepspeed.test_programs:adversaries_worker", world=1, payload=names)[
        0
    ]
    for name in names:
        (none, alone), (calls, through) = results[name, False], results[name, True]
        assert none == [0, 0, 0] and calls == [3, 3, 3], "a call of each layer is passed over"
        assert alone.keys() == through.keys() and len(alone) == 6
        for key, (factor, updates) in alone.items():
            assert updates == 3 == through[key][1] and torch.equal(through[key][0], factor), key
