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


def step_of(engine, loss) -> None:
    engine.backward(loss)
    engine.step()


def steps_with(engine, loss_of=None, disturb=None, steps=range(STEPS)):
    """Steps by ``loss_of(step)``, by default the engine's own; before every one from the third on,
    ``disturb(step)``."""
    for step in steps:
        if disturb and step > 2:
            disturb(step)
        step_of(engine, loss_of(step) if loss_of else engine(*batch(step)))
    return engine


@program("backward without step, gradients dropped")
def _(make, disturbed):
    engine = make()

    def dropped(step):
        if step == 5:
            engine.backward(engine(*batch(50)))
            engine.zero_grad()
            engine.optimizer.zero_grad()

    return steps_with(engine, disturb=dropped)


@program("empty batch on one rank")
def _(make, disturbed):
    engine = make()

    def loss_of(step):
        x, y = batch(step)
        if step > 2 and dist.get_rank() == 1:
            x, y = x[:0], y[:0]
        z = engine(x)
        return nn.functional.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum") / 12

    return steps_with(engine, loss_of)


@program("batches of other sizes, one row, odd lengths")
def _(make, disturbed):
    engine = make()

    def loss_of(step):
        x, y = batch(step)
        rows, length = 1 + step % 4, 1 + (step + dist.get_rank()) % 3
        return engine(x[:rows, :length], y[:rows, :length])

    return steps_with(engine, loss_of)


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

    def change(step):
        model.used = dist.get_rank() == 0

    return steps_with(make(model), disturb=change)


@program("a frozen tower before trained layers")
def _(make, disturbed):
    return steps_with(make(Frozen()))


@program("load_checkpoint in the middle, of the same engine", exact=True)
def _(make, disturbed):
    engine = steps_with(make(), steps=range(4))
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        if disturbed:
            steps_with(engine, steps=range(4, 7))
            engine(*batch(60))  # and in the middle of a step
            engine.load_checkpoint(str(folder))
    return steps_with(engine, steps=range(4, STEPS))


class Interrupted(Exception):
    """Raised in the middle of an optimizer's step."""


def interrupt(*_: Any) -> None:
    raise Interrupted


# at ZeRO-3 DeepSpeed alone cannot load a checkpoint after it
@program("an error in the optimizer's step, then load_checkpoint", exact=True, stages=(0, 2))
def _(make, disturbed):
    """K-FAC has changed its state by then, and no weight has moved."""
    engine = steps_with(make(), steps=range(4))
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        if disturbed:
            inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
            hook = inner.register_step_pre_hook(interrupt)
            try:
                step_of(engine, engine(*batch(4)))
                raise NothingTried("the hook of the optimizer's step did not run")
            except Interrupted:
                hook.remove()
            engine.zero_grad()
            engine.load_checkpoint(str(folder))
    return steps_with(engine, steps=range(4, STEPS))


@program("save_checkpoint between micro-batches", exact=True)
def _(make, disturbed):
    engine = make(accumulation=2)
    with shared_folder() as folder:

        def save(step):
            if disturbed and step % 2 == 1:
                engine.save_checkpoint(str(folder), tag="tag")

        return steps_with(engine, disturb=save, steps=range(2 * STEPS))


@program("state_dict saved and loaded", exact=True, stages=(0, 2))
def _(make, disturbed):
    engine = make()

    def save(step):
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        file.seek(0)
        engine.module.load_state_dict(torch.load(file))

    return steps_with(engine, disturb=save if disturbed else None)


@program("detach in the middle of a step", refused=True, stages=(0, 2))
def _(make, disturbed):
    engine = make()

    def leave(step):
        if step == 5 and hasattr(engine, "kfac"):
            engine.backward(engine(*batch(50)))
            engine.kfac.detach()
            engine.step()

    return steps_with(engine, disturb=leave)


@program("model called past the engine", stages=(0, 2))
def _(make, disturbed):
    engine = make()
    return steps_with(engine, lambda step: engine.module(*batch(step)))


@program("part of the model in eval mode")
def _(make, disturbed):
    engine = make()
    return steps_with(engine, disturb=lambda step: engine.module.middle.train(step % 2 == 0))


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
    engine = make()

    def differentiate(step):
        x, y = batch(50 + step)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(engine.module(x, y), x)
        assert gradient.shape == x.shape

    return steps_with(engine, disturb=differentiate if disturbed else None)


@contextlib.contextmanager
def shared_folder():
    """Of all ranks. Collective."""
    place = [tempfile.mkdtemp(prefix="saves", dir=Path(os.readlink("/proc/self/fd/1")).parent)]
    dist.broadcast_object_list(place)
    yield Path(place[0])
    dist.barrier()
