"""Legal programs: every way to call a model, and calls that are not the same in every step."""

from contextlib import nullcontext

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.close import exact
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, expected, micro_batches, train, weights
from tests.models import Net, Stoppable, cross_entropy, make_net
from tests.ranks import of_ranks
from tests.spread import difference, within

STEPS, EVENT = 5, 3
"""In step EVENT something else happens. It is one without a proof of rows, as stage 2 of DeepSpeed
loses the gradient of a micro-batch in "another accumulation"."""


class Called(Stoppable):
    """A model whose body may be checkpointed."""

    checkpointed = ""

    def forward(self, x, y=None):
        if not self.checkpointed:
            return super().forward(x, y)

        def body(x):
            return torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))

        if self.checkpointed == "deepspeed":
            z = deepspeed.checkpointing.checkpoint(body, x.requires_grad_())
        else:
            reentrant = self.checkpointed == "reentrant"
            z = checkpoint(body, x.requires_grad_(), use_reentrant=reentrant)
        return cross_entropy(self.head(z), y)


def backward_of(engine, way: str, x, y, count: int) -> None:
    """The backward pass of one of ``count`` micro-batches."""
    if way == "direct":
        engine(x, y).backward()
    elif way == "direct, of logits":
        cross_entropy(engine(x), y).backward()
    elif way == "scale":
        engine.scale(engine(x, y)).backward()
    elif way in DIVIDED:
        engine.backward(engine(x, y) / count, scale_wrt_gas=False)
    else:
        loss = engine(x, y)
        if way == "second forward":
            engine(2 * x, y)
        engine.backward(loss)


def do_before(engine, event: str, x, y) -> None:
    """Do something that adds nothing to a step, or more micro-batches."""
    if event == "evaluation":
        with torch.no_grad():
            engine(x, y)
        engine.eval()
        engine(x, y)
        engine.train()
    elif event == "skipped":
        assert torch.isnan(engine(x * float("nan"), y))
    elif event == "second forward":
        engine(2 * x, y)
    elif event == "stopped":
        engine.module.stops = True
        with pytest.raises(FloatingPointError):
            engine.backward(engine(x, y))
        engine.module.stops = False
        engine.zero_grad()
    elif event == "no step":
        with engine.no_sync():
            engine.backward(engine(2 * x, y))
    elif event == "another accumulation":
        engine.backward(engine(x, y))
        engine.set_train_batch_size(2 * engine.train_batch_size())
        engine.step()  # no longer the boundary


def run_step(engine, step: int, way: str, happens: bool, count: int) -> None:
    for place, (x, y) in enumerate(micro_batches(step, count)):
        last = place == count - 1
        if way in ("accelerate", "boundary"):  # tells the boundary itself and steps only there
            engine.set_gradient_accumulation_boundary(last)
        if happens and place == 0:
            do_before(engine, way, x, y)
        with engine.no_sync() if way == "no_sync" and not last else nullcontext():
            backward_of(engine, way if happens else "", x, y, count)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "step in autocast"):
            if last or way not in ("accelerate", *ACCUMULATED):
                engine.step()
    if way == "another accumulation" and happens:
        engine.set_train_batch_size(engine.train_batch_size() // 2)


BOTH, CHECKPOINTED = (0, 1), ("reentrant", "non-reentrant", "deepspeed")
ACCUMULATED = ("boundary", "no_sync", "unmanaged")
"""The program accumulates micro-batches, of an engine that is told of none."""
DIVIDED = ("the caller divides", *ACCUMULATED)
ALWAYS = {
    "z0": ("the caller divides", "step in autocast", "reentrant", "deepspeed", "no_sync"),
    # DeepSpeed itself refuses a direct backward at stage 0
    "z1": ("direct", "scale", "accelerate"),
    "z2": ("direct, of logits", "accelerate", "step in autocast", "unmanaged"),
    "z3": ("direct", "scale", "the caller divides", "boundary", *CHECKPOINTED),
}
"""Mode -> ways to train in all steps."""
EVENTS = [
    ("z0", "evaluation", BOTH),
    ("z3", "evaluation", BOTH),
    ("z0", "skipped", (0,)),
    ("z2", "skipped", BOTH),
    ("z0", "second forward", (1,)),
    ("z2", "second forward", BOTH),
    ("z0", "stopped", (0,)),
    ("z0", "no step", (1,)),
    ("z2", "another accumulation", BOTH),
]
"""Mode, what happens in a step, and on which ranks."""
ADD = ("no step", "another accumulation")
"""Events after which a step has more micro-batches than the reference's."""


@pytest.mark.ranks(2)
def test_every_way_to_run_a_model_trains_like_the_reference():
    deepspeed.checkpointing.configure(None, partition_activations=False)
    wrong, always = [], [(name, way, None) for name, ways in ALWAYS.items() for way in ways]
    for name, way, who in always + EVENTS:
        count = 1 if way in ADD else 2
        model = make_net(Called)
        model.checkpointed = way if way in CHECKPOINTED else ""
        told = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
        engine = build(BY_NAME[name], 1 if way in ACCUMULATED else count, model=model, **told)
        initial = weights(engine)
        for step in range(STEPS):
            happens = who is None or (step == EVENT and dist.get_rank() in who)
            run_step(engine, step, way, happens, count)
        assert engine.kfac.preconditioner.steps == engine.global_steps == STEPS, (name, way)
        final = weights(engine)
        exact(final, of_ranks(final)[0], what=f"{name} {way} {who}")
        assert all(weight.isfinite().all() for weight in final.values())
        if way not in ADD and dist.get_rank() == 0:
            found = expected(BY_NAME[name], count, 2, initial, steps=STEPS)
            wrong += within(f"{name} {way}", difference(final, found.weights, initial), found.bound)
        engine.destroy()
    assert not wrong, "\n".join(wrong)


# layers that share an input, and at some step do not


class Attention(Net):
    """Projections of one input; at some step one of them gets an input of its own, is used no more,
    or twice, the second time with another input."""

    parted = False
    calls = 1

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(17, 17, bias=False) for _ in range(3))
        self.gate, self.up = nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        own = sum(self.q(part) for part in (z, 2.0 * z)[: self.calls])
        z = z + own + self.k(2.0 * z if self.parted else z).softmax(-1) * self.v(z)
        z = z + torch.tanh(self.gate(z)) * self.up(z)
        return cross_entropy(self.head(torch.tanh(self.middle(z))), y)


@pytest.mark.ranks(2)
def test_layers_of_a_group_may_have_different_inputs_in_a_step_on_some_ranks():
    for name, interval, who in (("z0", 2, (1,)), ("z2", 2, (0, 1)), ("z3", 1, (0,))):
        kfac = {
            "factor": {"update_interval": interval},
            "eigenbasis": {"refresh_interval": interval},
            "burn_in": {"steps": 0},
        }
        mode = Mode(name, BY_NAME[name].stage, kfac=kfac)
        engine, history = build(mode, 1, model=make_net(Attention)), []
        kfac = engine.kfac.preconditioner
        for step in range(4 * interval):
            engine.module.parted = 2 * interval <= step < 3 * interval and dist.get_rank() in who
            before = kfac.channel.calls.copy()
            train(engine, 1, steps=1, first=step)
            calls = of_ranks(sum((kfac.channel.calls - before).values()))
            assert calls[0] == calls[1], "the same collectives on all ranks"
            assert set(kfac.observations.groups) == {("gate", "up"), ("q", "k", "v")}, (name, step)
            own = {key: factor.packed_P.clone() for key, factor in kfac.curvature.factors.items()}
            history.append({key: P for of_rank in of_ranks(own) for key, P in of_rank.items()})
        before, parted, after = (history[index * interval - 1] for index in (2, 3, 4))
        for key in ("q/A", "k/G", "gate/A"):
            assert not torch.equal(before[key], parted[key]), key
            assert not torch.equal(parted[key], after[key]), key
