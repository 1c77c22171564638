"""The unusual programs of :mod:`tests.campaign.usage`, a function each: (make an engine, disturb or not) -> engine."""

import contextlib
import copy
import io
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.campaign.models import Branches, Conditional, Discriminator, Frozen, Named
from tests.deepspeed.runs import micro_batches
from tests.models import FEATURES, Stoppable, make_net

STEPS = 8
Make = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """A program and its claims.

    Attributes:
        exact: undisturbed, it gives the same weights to the bit.
        refused: an error that names the cause is right.
    """

    run: Callable[[Make, bool], Any]
    exact: bool = False
    refused: bool = False
    stages: tuple[int, ...] = (0, 2, 3)


PROGRAMS: dict[str, Program] = {}


def program(name: str, **settings: Any):
    def register(function: Callable[[Make, bool], Any]):
        PROGRAMS[name] = Program(function, **settings)
        return function

    return register


def batch(step: int):
    ((x, y),) = micro_batches(step, 1)
    return x, y


def step_of(engine, step: int) -> float:
    x, y = batch(step)
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def steps_with(make: Make, disturb: Callable[[Any, int], Any], disturbed: bool = True, model=None, **over: Any):
    """Ordinary steps; before every one from the third on, ``disturb(engine, step)``."""
    engine = make(model, **over)
    for step in range(STEPS):
        if disturbed and step > 2:
            disturb(engine, step)
        step_of(engine, step)
    return engine


@program("eval forward between steps", exact=True)
def _(make, disturbed):
    def evaluate(engine, step):
        engine.eval()
        with torch.no_grad():
            engine(*batch(50 + step))
        engine.train()

    return steps_with(make, evaluate, disturbed)


@program("no_grad training forward between forward and backward", exact=True)
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        loss = engine(*batch(step))
        if disturbed:
            with torch.no_grad():
                engine(*batch(50 + step))
        engine.backward(loss)
        engine.step()
    return engine


@program("the same, Monte-Carlo Fisher", exact=True, stages=(0, 2))
def _(make, disturbed):
    engine = make(kfac={"factor": {"update_interval": 1, "fisher": "monte_carlo", "prediction": "head"}})
    for step in range(STEPS):
        loss = engine(*batch(step))
        if disturbed and step > 2:
            with torch.no_grad():
                engine(*batch(50 + step))
        engine.backward(loss)
        engine.step()
    return engine


@program("training forward without backward", exact=True)
def _(make, disturbed):
    return steps_with(make, lambda engine, step: engine(*batch(50 + step)), disturbed)


@program("two training forwards, one backward", stages=(0, 2))
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        loss = engine(*batch(step))
        if step in (4, 5):
            loss = (loss + engine(*batch(50 + step))) / 2
        engine.backward(loss)
        engine.step()
    return engine


@program("a batch with NaN is skipped by all ranks", exact=True)
def _(make, disturbed):
    def skipped(engine, step):
        x, y = batch(50 + step)
        loss = engine(torch.full_like(x, float("nan")), y)
        assert not torch.isfinite(loss)  # no backward: the next batch

    return steps_with(make, skipped, disturbed)


@program("a batch with NaN is skipped by one rank", exact=True, stages=(0, 2))
def _(make, disturbed):
    def skipped(engine, step):
        x, y = batch(50 + step)
        if dist.get_rank() == 1:
            engine(torch.full_like(x, float("nan")), y)

    return steps_with(make, skipped, disturbed)


@program("backward without step, gradients dropped")
def _(make, disturbed):
    def dropped(engine, step):
        if step == 5:
            engine.backward(engine(*batch(50)))
            engine.zero_grad()
            engine.optimizer.zero_grad()

    return steps_with(make, dropped)


@program("exception in backward, caught", stages=(0,))
def _(make, disturbed):
    model = make_net(Stoppable)
    engine = make(model)
    for step in range(STEPS):
        model.stops = disturbed and step == 5
        with contextlib.suppress(FloatingPointError):
            step_of(engine, step)
        engine.zero_grad()
    model.stops = False
    return engine


@program("exception between forward and backward, caught")
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        with contextlib.suppress(KeyboardInterrupt):
            loss = engine(*batch(step))
            if step == 5:
                raise KeyboardInterrupt
            engine.backward(loss)
            engine.step()
    return engine


def _resized(make, changes: dict[int, int], steps: int, **over: Any):
    """Ordinary steps; from some on with another number of micro-batches."""
    engine = make(**over)
    rows, world = engine.train_micro_batch_size_per_gpu(), dist.get_world_size()
    for step in range(steps):
        if step in changes:
            engine.set_train_batch_size(rows * world * changes[step])
        step_of(engine, step)
    return engine


@program("set_train_batch_size: 1, 2, 1 micro-batches")
def _(make, disturbed):
    return _resized(make, {8: 2, 16: 1}, 3 * STEPS)


@program("gradient accumulation of 4, changed to 2 and back")
def _(make, disturbed):
    return _resized(make, {12: 2, 20: 4}, 32, accumulation=4)


@program("empty batch on one rank")
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        x, y = batch(step)
        if step > 2 and dist.get_rank() == 1:
            x, y = x[:0], y[:0]
        z = engine(x)
        losses = nn.functional.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum")
        engine.backward(losses / 12)
        engine.step()
    return engine


@program("batches of other sizes, one row, odd lengths")
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        x, y = batch(step)
        rows, length = 1 + step % 4, 1 + (step + dist.get_rank()) % 3
        engine.backward(engine(x[:rows, :length], y[:rows, :length]))
        engine.step()
    return engine


def _parting(make, ranks: Collection[int]):
    model = Branches()

    def change(engine, step):
        model.apart = step > 4 and dist.get_rank() in ranks

    return steps_with(make, change, model=model)


@program("data flow changes")
def _(make, disturbed):
    return _parting(make, range(dist.get_world_size()))


@program("data flow changes on one rank")
def _(make, disturbed):
    return _parting(make, {1})


@program("a layer used in every other step", stages=(0, 2))
def _(make, disturbed):
    model = Conditional()

    def change(engine, step):
        model.used = step % 2 == 0

    return steps_with(make, change, model=model)


@program("a layer used on one rank only", stages=(0,))  # at ZeRO-2 DeepSpeed alone aborts: its buckets then differ
def _(make, disturbed):
    model = Conditional()

    def change(engine, step):
        model.used = dist.get_rank() == 0

    return steps_with(make, change, model=model)


@program("a layer called twice from some step on", stages=(0, 2))
def _(make, disturbed):
    model = Conditional()

    def change(engine, step):
        model.times = 2 if step > 4 else 1

    return steps_with(make, change, model=model)


@program("frozen from the start")
def _(make, disturbed):
    model = make_net()
    model.middle.weight.requires_grad_(False)
    before = model.middle.weight.detach().clone()
    engine = steps_with(make, lambda engine, step: None, model=model)
    after = dict(engine.module.named_parameters())["middle.weight"]
    if after.shape == before.shape:
        assert torch.equal(after.detach().float(), before), "ds_kfac moved a frozen parameter"
    return engine


@program("frozen in the middle of a run", stages=(0,))
def _(make, disturbed):
    def freeze(engine, step):
        if step == 4:
            engine.module.middle.weight.requires_grad_(False)

    return steps_with(make, freeze)


@program("a frozen tower before trained layers")
def _(make, disturbed):
    return steps_with(make, lambda engine, step: None, model=Frozen())


@program("two engines: generator through discriminator", exact=True, stages=(0, 2))
def _(make, disturbed):
    """The discriminator's statistics do not depend on whether the generator trains through it."""
    torch.manual_seed(3)
    generator, judge = make(Discriminator(FEATURES, FEATURES)), make(Discriminator(FEATURES, 1))
    for step in range(STEPS):
        x, _ = batch(step)
        real, fake = judge(x), judge(torch.sin(x))
        judge.backward(nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean())
        judge.step()
        if disturbed:
            judge.module.requires_grad_(False)
            generator.backward(nn.functional.softplus(-judge(generator(x))).mean())
            generator.step()
            judge.module.requires_grad_(True)
    generator.destroy()
    return judge


@program("layer names with / and of 300 characters, saved and loaded", exact=True)
def _(make, disturbed):
    engine = make(Named())
    for step in range(4):
        step_of(engine, step)
    if disturbed:
        with shared_folder() as folder:
            engine.save_checkpoint(str(folder), tag="tag")
            outside = list(Path("/").glob("campaign-escape*"))
            assert not outside, f"ds_kfac wrote outside of the folder: {outside}"
            engine.destroy()
            torch.manual_seed(77)
            engine = make(Named())
            engine.load_checkpoint(str(folder), tag="tag")
    for step in range(4, STEPS):
        step_of(engine, step)
    return engine


@program("load_checkpoint in the middle, of the same engine", exact=True)
def _(make, disturbed):
    engine = make()
    for step in range(4):
        step_of(engine, step)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        if disturbed:
            for step in range(4, 7):
                step_of(engine, step)
            engine(*batch(60))  # and in the middle of a step
            engine.load_checkpoint(str(folder))
    for step in range(4, STEPS):
        step_of(engine, step)
    return engine


@program("save_checkpoint twice with one tag", exact=True)
def _(make, disturbed):
    engine = make()
    with shared_folder() as folder:
        for step in range(4):
            step_of(engine, step)
            if disturbed:
                engine.save_checkpoint(str(folder), tag="tag")
                engine.save_checkpoint(str(folder), tag="tag")
        if disturbed:
            engine.destroy()
            torch.manual_seed(77)
            engine = make(make_net(seed=9))
            engine.load_checkpoint(str(folder), tag="tag")
    for step in range(4, STEPS):
        step_of(engine, step)
    return engine


@program("save_checkpoint between micro-batches", exact=True)
def _(make, disturbed):
    engine = make(accumulation=2)
    with shared_folder() as folder:
        for step in range(2 * STEPS):
            step_of(engine, step)
            if disturbed and step % 2 == 0:
                engine.save_checkpoint(str(folder), tag="tag")
    return engine


@program("deepcopy of the model, and the copy used", exact=True)
def _(make, disturbed):
    def average(engine, step):
        twin = copy.deepcopy(engine.module)
        if not hasattr(next(engine.module.parameters()), "ds_id"):  # a copy of a partitioned model does not run
            twin.train()(*batch(50 + step)).backward()

    return steps_with(make, average, disturbed)


@program("torch.save of the model", exact=True)
def _(make, disturbed):
    def save(engine, step):
        torch.save(engine.module, io.BytesIO())

    return steps_with(make, save, disturbed)


@program("state_dict saved and loaded", exact=True, stages=(0, 2))
def _(make, disturbed):
    def save(engine, step):
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        file.seek(0)
        engine.module.load_state_dict(torch.load(file))

    return steps_with(make, save, disturbed)


@program("engine.destroy twice, and a new engine", exact=True)
def _(make, disturbed):
    if disturbed:
        old = make(make_net(seed=4))
        step_of(old, 0)
        old.destroy()
        old.destroy()
    return steps_with(make, lambda engine, step: None, disturbed=False)


@program("detach in the middle of a step", refused=True, stages=(0, 2))
def _(make, disturbed):
    def leave(engine, step):
        if step == 5 and hasattr(engine, "kfac"):
            engine.backward(engine(*batch(50)))
            engine.kfac.detach()
            engine.step()

    engine = make()
    for step in range(STEPS):
        leave(engine, step)
        step_of(engine, step)
    return engine


@program("loss.backward() instead of engine.backward")
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        engine(*batch(step)).backward()
        engine.step()
    return engine


@program("model called past the engine", stages=(0, 2))
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        engine.backward(engine.module(*batch(step)))
        engine.step()
    return engine


@program("part of the model in eval mode")
def _(make, disturbed):
    def part(engine, step):
        engine.module.middle.train(step % 2 == 0)

    return steps_with(make, part)


@program("inputs that require gradients, and autograd.grad before backward", stages=(0, 2))
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        x, y = batch(step)
        x.requires_grad_()
        loss = engine(x, y)
        penalty = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert penalty.shape == x.shape
        engine.backward(loss)
        engine.step()
    return engine


@contextlib.contextmanager
def shared_folder():
    """Of all ranks. Collective."""
    place = [tempfile.mkdtemp(prefix="saves", dir=Path(os.readlink("/proc/self/fd/1")).parent)]
    dist.broadcast_object_list(place)
    yield Path(place[0])
    dist.barrier()
