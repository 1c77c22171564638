"""The unusual programs of :mod:`tests.campaign.usage`, a function each: (make an engine, disturb or
not) -> engine."""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.campaign.harness import NothingTried
from tests.deepspeed.runs import micro_batches
from tests.models import Net, cross_entropy

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


def steps_with(
    make: Make, disturb: Callable[[Any, int], Any], disturbed: bool = True, model=None, **over: Any
):
    """Ordinary steps; before every one from the third on, ``disturb(engine, step)``."""
    engine = make(model, **over)
    for step in range(STEPS):
        if disturbed and step > 2:
            disturb(engine, step)
        step_of(engine, step)
    return engine


@program("backward without step, gradients dropped")
def _(make, disturbed):
    def dropped(engine, step):
        if step == 5:
            engine.backward(engine(*batch(50)))
            engine.zero_grad()
            engine.optimizer.zero_grad()

    return steps_with(make, dropped)


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


class Conditional(Net):
    """A layer behind ``middle`` is used or not."""

    used = True

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(19, 19)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))
        return cross_entropy(self.head(h + torch.tanh(self.side(h)) if self.used else h), y)


class Frozen(Net):
    """The first layers are frozen and run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.norm(self.silu(self.first(x)))
        return cross_entropy(self.head(torch.tanh(self.middle(h))), y)


# at ZeRO-2 DeepSpeed alone aborts: its buckets then differ
@program("a layer used on one rank only", stages=(0,))
def _(make, disturbed):
    model = Conditional()

    def change(engine, step):
        model.used = dist.get_rank() == 0

    return steps_with(make, change, model=model)


@program("a frozen tower before trained layers")
def _(make, disturbed):
    return steps_with(make, lambda engine, step: None, model=Frozen())


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


class Interrupted(Exception):
    """Raised in the middle of an optimizer's step."""


def interrupt(*_: Any) -> None:
    raise Interrupted


# at ZeRO-3 DeepSpeed alone cannot load a checkpoint after it
@program("an error in the optimizer's step, then load_checkpoint", exact=True, stages=(0, 2))
def _(make, disturbed):
    """K-FAC has changed its state by then, and no weight has moved."""
    engine = make()
    for step in range(4):
        step_of(engine, step)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        if disturbed:
            inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
            hook = inner.register_step_pre_hook(interrupt)
            try:
                step_of(engine, 4)
                raise NothingTried("the hook of the optimizer's step did not run")
            except Interrupted:
                hook.remove()
            engine.zero_grad()
            engine.load_checkpoint(str(folder))
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


@program("state_dict saved and loaded", exact=True, stages=(0, 2))
def _(make, disturbed):
    def save(engine, step):
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        file.seek(0)
        engine.module.load_state_dict(torch.load(file))

    return steps_with(make, save, disturbed)


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


@program("inputs that require gradients", exact=True)
def _(make, disturbed):
    engine = make()
    for step in range(STEPS):
        x, y = batch(step)
        x.requires_grad_(disturbed)
        engine.backward(engine(x, y))
        assert not disturbed or x.grad.shape == x.shape
        engine.step()
    return engine


@program("autograd.grad through another forward of the model", exact=True)
def _(make, disturbed):
    def differentiate(engine, step):
        x, y = batch(50 + step)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(engine.module(x, y), x)
        assert gradient.shape == x.shape

    return steps_with(make, differentiate, disturbed)


@contextlib.contextmanager
def shared_folder():
    """Of all ranks. Collective."""
    place = [tempfile.mkdtemp(prefix="saves", dir=Path(os.readlink("/proc/self/fd/1")).parent)]
    dist.broadcast_object_list(place)
    yield Path(place[0])
    dist.barrier()
