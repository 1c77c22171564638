"""K-FAC runs at the inner optimizer's first step, where DeepSpeed has decided to apply it: what
lies there, by which factor it is still multiplied, and what steps that are skipped or raise leave
behind."""

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist

from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.registry import shard_layout
from ds_kfac.zero.seam import Seam
from tests.close import exact
from tests.deepspeed.modes import BY_NAME, CLIPPED, LR, Mode
from tests.deepspeed.runs import build, micro_batches, parameter_groups, patched, train, weights
from tests.models import make_net

pytestmark = pytest.mark.distributed
GROWS = {"fp16": {"initial_scale_power": 8, "loss_scale_window": 2}}
"""The loss scale doubles within a step, between norm and division."""
STEPS = 4


MODES = {
    0: ("z0", "z0-bf16", "z0-bf16-fused", "z0-fp16", "z0-fp16-fused"),
    1: ("z1", "z1-offload", "z1-bf16", "z1-bf16-offload", "z1-bf16-accum32", "z1-fp16"),
    2: ("z2", "z2-offload", "z2-bf16", "z2-bf16-offload", "z2-fp16", "z2-fp16-offload"),
    3: ("z3-sub_groups", "z3-offload", "z3-bf16", "z3-bf16-offload", "z3-fp16", "z3-fp16-offload"),
}


def modes_of(stage: int) -> list[Mode]:
    """Clipped and not, of two parameter groups."""
    modes = [BY_NAME[name] for name in MODES[stage]]
    grows = [replace(m, extra=GROWS) if m.dtype == "fp16" else m for m in modes]
    return [replace(m, groups="decay", clip=clip) for m in grows for clip in (0.0, CLIPPED)]


def plain_engine(mode: Mode, rate: float = LR) -> Any:
    """Without K-FAC, with SGD."""
    config = {**mode.config(1, dist.get_world_size())}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}}
    del config["kfac"]
    model = make_net()
    with patched(mode):
        return deepspeed.initialize(
            model=model, model_parameters=parameter_groups(model, mode.groups), config=config
        )[0]


class Doubling:
    """Doubles all gradients where they lie at the first inner step.

    Attributes:
        told: what the seam has called, step by step.
        promised: shard -> gradient times the factor that is still to come, as doubled.
        wrong: shards that the inner optimizer stepped with something else.
        narrow: shards in whose memory a large result would overflow.
        stepped: how many shards it has stepped.
    """

    def __init__(self, engine: Any) -> None:
        self.seam, self.told = Seam(engine), list[str]()
        self.layout: ShardLayout = shard_layout(
            engine, list(engine.module.parameters()), engine.seq_data_parallel_group, seam=self.seam
        )
        self.promised: dict[Any, torch.Tensor] = {}
        self.wrong, self.narrow, self.stepped = list[Any](), list[Any](), 0
        self.seam.open(self)
        self.inner = self.seam.inner
        self.inner.register_step_pre_hook(self._look)

    proves = False

    def begin(self) -> None:
        self.told.append("begin")
        self.layout.begin()

    def step(self) -> None:
        self.told.append("step")
        for shard, gradient in self.layout.gradients().items():
            gradient.mul_(2.0)
            if gradient.dtype is torch.float16:
                self.narrow.append(shard)
            factor = self.seam.factor if self.layout.raw(shard) else None
            self.promised[shard] = (
                gradient.float().clone() if factor is None else gradient.float() * factor.view(1)
            )

    def end(self, *, applied: bool) -> None:
        self.told.append(f"end {applied}")
        self.layout.end()

    def raised(self, *, begun: bool) -> None:
        self.told.append(f"raised {begun}")

    def _look(self, *_: Any) -> None:
        shown = {id(param) for group in self.inner.param_groups for param in group["params"]}
        for shard, promised in self.promised.items():
            master = self.layout.master(shard)
            if id(master) in shown and master.grad is not None:
                found = master.grad.reshape(-1)[shard.offset : shard.offset + shard.numel]
                self.stepped += 1
                if not torch.equal(found, promised.to(found.dtype)):
                    self.wrong.append(shard)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.ranks(2)
def test_the_inner_optimizer_steps_once_with_the_gradient_times_the_factor(stage):
    """To the bit, of the first group and of all later ones; and gradients that are doubled in place
    give the weights of twice the rate."""
    for mode in modes_of(stage):
        twice, engine = plain_engine(mode, 2 * LR), plain_engine(mode)
        doubling = Doubling(engine)
        with patched(mode):
            train(twice, 1, steps=STEPS)
            train(engine, 1, steps=STEPS)
        assert doubling.told == ["begin", "step", "end True"] * STEPS, mode.name
        assert doubling.stepped == STEPS * len(doubling.layout.own) and not doubling.wrong, (
            mode.name
        )
        assert not doubling.narrow, f"{mode.name}: fp16 does not hold every result"
        exact(weights(engine), weights(twice), what=mode.name)
        # at stage 0 in fp16 DeepSpeed divides by a loss scale that it never multiplied by
        norm = engine.get_global_grad_norm()
        assert norm is None or norm > 2 * CLIPPED or mode.name.startswith("z0-fp16"), "is clipped"


class OwnAdamW(torch.optim.AdamW):
    """torch runs an optimizer's hooks in ``step`` of each class of which the process has an
    instance."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.ranks(1)
def test_hooks_that_torch_runs_twice_are_one_step():
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    model = make_net()
    config = {**BY_NAME["z0"].config(1, 1)}
    del config["optimizer"], config["kfac"]
    optimizer = OwnAdamW(model.parameters(), lr=LR)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    doubling = Doubling(engine)
    train(engine, 1, steps=2)
    assert doubling.told == ["begin", "step", "end True"] * 2


@pytest.mark.ranks(1)
def test_a_step_without_gradients_is_none_after_one_that_raised():
    engine = plain_engine(BY_NAME["z0-noclip"])
    doubling = Doubling(engine)
    with patch.object(doubling.layout, "gradients", side_effect=FloatingPointError("stopped")):
        with contextlib.suppress(FloatingPointError):
            train(engine, 1, steps=1)
    engine.optimizer.zero_grad()
    engine.optimizer.step()
    train(engine, 1, steps=1, first=1)
    assert doubling.told == ["begin", "step", "raised True", "begin", "step", "end True"]


OUTER = ["z0-noclip", "z0-fp16", "z0-bf16-fused", "z1-bf16-accum32", "z2", "z2-fp16"]
OUTER += ["z3-offload", "adam-z2", "adam-z3"]


@pytest.mark.ranks(1)
def test_the_optimizers_step_in_place_of_the_engines_gives_the_same_weights():
    for name in OUTER:
        mode, trained = replace(BY_NAME[name], groups="decay"), []
        for own in (False, True):
            engine = build(mode, 1)
            for x, y in (batch for step in range(3) for batch in micro_batches(step, 1)):
                with patched(mode):
                    engine.backward(engine(x.to(engine.get_data_types()[0]), y))
                if own:
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                else:
                    engine.step()
            assert engine.kfac.preconditioner.steps == 3
            trained.append(weights(engine))
            engine.destroy()
        exact(*trained, what=name)


@pytest.mark.ranks(1)
def test_a_second_step_after_one_backward_changes_nothing_at_stage_0():
    engine = build(BY_NAME["z0-noclip"], 1)  # clipping, DeepSpeed itself fails without gradients
    train(engine, 1, steps=2)
    before, kfac = weights(engine), engine.kfac.preconditioner
    factors = {key: factor.packed_P.clone() for key, factor in kfac.curvature.factors.items()}
    engine.step()
    assert kfac.steps == 2
    exact(weights(engine), before)
    exact({key: factor.packed_P for key, factor in kfac.curvature.factors.items()}, factors)


@pytest.mark.ranks(1)
def test_a_step_past_the_wrapped_one_is_an_error_and_moves_nothing():
    """A program puts back the step of the optimizer that it kept from before attach."""
    for name in ("adam-z2", "z2", "z0-bf16"):
        engine = build(BY_NAME[name], 1)
        train(engine, 1, steps=1)
        before = weights(engine)
        engine.optimizer.step = type(engine.optimizer).step.__get__(engine.optimizer)
        with pytest.raises(RuntimeError, match=r"engine\.kfac\.detach\(\)"):
            train(engine, 1, steps=1, first=1)
        exact(weights(engine), before, what=name)
