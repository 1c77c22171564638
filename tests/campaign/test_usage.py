"""Programs that use an engine in unusual ways, which DeepSpeed alone survives: K-FAC does, too."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.campaign.engines import engine_of, is_finite, mode_of, state_is_finite
from tests.close import exact
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import micro_batches, weights
from tests.models import Net, cross_entropy

STEPS = 8
OPTIMIZERS = {0: "AdamW", 2: "KFACAdamW", 3: "KFACAdamW"}
"""Stage -> the optimizer that a program runs with there."""
Program = Callable[[Callable[..., Any], bool], Any]
"""(make an engine, disturb it or not) -> the engine after some steps."""
PROGRAMS: dict[str, tuple[Program, bool, tuple[int, ...]]] = {}
"""Name -> program, whether it gives the weights of the undisturbed one to the bit, its stages."""


def program(name: str, *, same: bool = False, stages: tuple[int, ...] = (0, 2, 3)):
    def register(function: Program) -> Program:
        PROGRAMS[name] = function, same, stages
        return function

    return register


def batch(step: int) -> tuple[Tensor, Tensor]:
    return next(iter(micro_batches(step, 1)))


def steps_with(engine, loss_of=None, disturb=None, steps=range(STEPS)):
    """Steps by ``loss_of(step)``, by default the engine's own; before every one from the third on,
    ``disturb(step)``."""
    for step in steps:
        if disturb and step > 2:
            disturb(step)
        engine.backward(loss_of(step) if loss_of else engine(*batch(step)))
        engine.step()
    return engine


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


# at ZeRO-2 DeepSpeed alone aborts: its buckets then differ
@program("a layer used on one rank only", stages=(0,))
def _(make, disturbed):
    model = Conditional()

    def change(step):
        model.used = dist.get_rank() == 0

    return steps_with(make(model=model), disturb=change)


@program("load_checkpoint in the middle, of the same engine", same=True)
def _(make, disturbed):
    engine, folder = steps_with(make(), steps=range(4)), shared_folder()
    engine.save_checkpoint(folder)
    if disturbed:
        steps_with(engine, steps=range(4, 7))
        engine(*batch(60))  # and in the middle of a step
        engine.load_checkpoint(folder)
    return steps_with(engine, steps=range(4, STEPS))


@program("save_checkpoint between micro-batches", same=True)
def _(make, disturbed):
    engine, folder = make(accumulation=2), shared_folder()

    def save(step):
        if disturbed and step % 2 == 1:
            engine.save_checkpoint(folder, tag="tag")

    return steps_with(engine, disturb=save, steps=range(2 * STEPS))


@program("state_dict saved and loaded", same=True, stages=(0, 2))
def _(make, disturbed):
    engine = make()

    def save(step):
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        file.seek(0)
        engine.module.load_state_dict(torch.load(file))

    return steps_with(engine, disturb=save if disturbed else None)


@program("model called past the engine", stages=(0, 2))
def _(make, disturbed):
    engine = make()
    return steps_with(engine, lambda step: engine.module(*batch(step)))


@program("inputs that require gradients", same=True)
def _(make, disturbed):
    engine = make()

    def loss_of(step):
        x, y = batch(step)
        return engine(x.requires_grad_(disturbed), y)

    return steps_with(engine, loss_of)


CASES = [(name, stage) for name, (_, _, stages) in PROGRAMS.items() for stage in stages]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_program_that_deepspeed_alone_survives_trains_with_kfac(name, stage):
    run, same, _ = PROGRAMS[name]

    def trained(*, plain: bool = False, disturbed: bool = True):
        torch.manual_seed(0)
        mode = mode_of(stage, OPTIMIZERS[stage])
        return run(lambda **given: engine_of(mode, plain=plain, **given), disturbed)

    assert is_finite(weights(trained(plain=True))), "DeepSpeed alone does not survive it"
    engine = trained()
    found = weights(engine)
    assert is_finite(found) and state_is_finite(engine)
    if same:
        exact(found, weights(trained(disturbed=False)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_detach_in_the_middle_of_a_step_is_survived_or_said_on_all_ranks(stage):
    """KFACAdamW has no directions for its layers any more."""
    engine = engine_of(mode_of(stage, OPTIMIZERS[stage]))
    steps_with(engine, steps=range(5))
    engine.backward(engine(*batch(50)))
    engine.kfac.detach()
    if OPTIMIZERS[stage] == "KFACAdamW":
        with pytest.raises(RuntimeError, match="K-FAC was detached from this engine"):
            engine.step()
    else:
        engine.step()
        assert is_finite(weights(steps_with(engine)))
