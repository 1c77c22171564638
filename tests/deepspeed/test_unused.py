"""Layers that a step does not use, and parameters that are frozen: KFACAdamW leaves them alone, as
torch would."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from ds_kfac.step import proving
from tests.close import close
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, expected, patched, train, weights
from tests.models import FEATURES, Net, make_net
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
MODES = {
    "adam-z0": 1,
    "adam-z2": 2,
    "adam-z2-groups": 1,
    "adam-z2-offload": 2,
    "adam-z3": 2,
    "adam-z3-offload": 1,
    "adam-z0-bf16": 1,
    "adam-z0-bf16-fused": 2,
    "adam-z1-bf16-accum32": 1,
    "adam-z2-fp16": 1,
    "adam-z3-bf16": 2,
}
"""Name -> gradient accumulation."""
SGD = {"type": "SGD", "params": {"lr": 0.02}}  # momentum would go on
EXTRA = {"extra.weight", "extra.bias"}


class Alternating(Net):
    """A layer that every ``interval``-th step uses; ``per_step`` is how often a step calls the
    model."""

    per_step, interval = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.calls = nn.Linear(FEATURES, FEATURES), 0

    def forward(self, x, y=None):
        used = self.calls // self.per_step % self.interval == 0
        self.calls += 1
        return super().forward(x + self.extra(x) if used else x, y)


def steps_of(engine, accumulation: int = 1) -> Iterator[tuple[int, set[str]]]:
    """Yield each of four steps and the parameters that it moves."""
    before = weights(engine)
    for step in range(4):
        train(engine, accumulation, steps=1, first=step)
        after = weights(engine)
        yield step, {name for name in after if not torch.equal(after[name], before[name])}
        before = after


@pytest.mark.ranks(2)
def test_a_layer_that_a_step_does_not_use_is_left_as_it_is_in_every_mode():
    """No step, no decay, moments and their count kept; and everything else trains like the
    reference."""
    for name, accumulation in MODES.items():
        mode, model = BY_NAME[name], make_net(Alternating)
        model.per_step = accumulation
        engine = build(mode, accumulation, model=model)
        initial = weights(engine)
        with patched(mode):
            for step, moved in steps_of(engine, accumulation):
                assert moved & EXTRA == (set() if step % 2 else EXTRA) and moved - EXTRA, name
                assert engine.kfac.counters()["unused_layers"] == step % 2, name
        moments = {n: s.moments for n, s in engine.kfac.preconditioner.state.items()}
        assert "extra" not in moments or float(moments["extra"].updates) == 2.0, name
        trained = weights(engine)
        if dist.get_rank() == 0:
            found = expected(mode, accumulation, 2, initial, model=Alternating)
            apart = difference(trained, found.weights, initial)
            assert not within(name, apart, found.bound), name
        engine.destroy()


@pytest.mark.ranks(2)
def test_an_offloaded_gradient_that_was_not_renewed_is_not_preconditioned_again():
    for name in ("z0-noclip", "z1-offload", "z2", "z2-offload", "z3-offload"):
        model = make_net(Alternating)
        model.interval = 10**9  # only the first step uses it
        engine = build(BY_NAME[name], 1, model=model, optimizer=SGD, gradient_clipping=0.0)
        for step, moved in steps_of(engine):
            assert ("extra.weight" in moved) == (step == 0), (name, step)


@pytest.mark.ranks(2)
def test_a_frozen_parameter_is_not_moved_whenever_it_was_frozen():
    """One layer frozen from the start; later all of another one, and only the weight of a third."""
    names = ("adam-z0", "adam-z1", "adam-z2-offload", "adam-z3", "adam-z3-offload", "adam-z2-bf16")
    frozen = {"first.weight", "first.bias", "head.weight"}
    for name in (*names, "z2"):
        mode, model = BY_NAME[name], make_net(Alternating)
        model.interval = 1
        model.extra.requires_grad_(False)
        engine = build(mode, 1, model=model, **({} if mode.adam else {"optimizer": SGD}))
        with patched(mode):
            for step, moved in steps_of(engine):
                assert not moved & EXTRA, (name, step)
                assert moved & frozen == (frozen if step < 2 else set()), (name, step, moved)
                assert {"middle.weight", "head.bias"} <= moved, (name, step)
                if step == 1:
                    model.first.requires_grad_(False)
                    model.head.weight.requires_grad_(False)


# what is unfrozen later


def own_part(p: nn.Parameter) -> torch.Tensor:
    """This rank's elements, and at stage 3 their padding: memory that DeepSpeed never writes where
    ranks do not divide the elements."""
    return getattr(p, "ds_tensor", p).detach().flatten()


def own_elements(p: nn.Parameter) -> int:
    """How many of a parameter's elements this rank holds."""
    if not hasattr(p, "ds_tensor"):
        return p.numel()
    return min(max(p.ds_numel - dist.get_rank() * p.ds_tensor.numel(), 0), p.ds_tensor.numel())


def partly_frozen(kind: str, stage: int, first: str, half: bool):
    """An engine, and its frozen parameters: norms, or a whole group of its own."""
    model = make_net()
    frozen = [p for n, p in model.named_parameters() if n.startswith(first)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    groups = list(model.parameters())
    if first == "first":
        others = [p for n, p in model.named_parameters() if not n.startswith(first)]
        groups = [{"params": frozen, "lr": 0.02}, {"params": others}]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config |= {"bf16": {"enabled": half}}
    config["optimizer"] = {"type": kind, "params": {"lr": 0.01, "torch_adam": True}}
    return ds_kfac.initialize(model=model, config=config, model_parameters=groups)[0], frozen


THAWED = [  # stage, what is frozen at first, 16 bits
    (0, "norm", False),
    (0, "first", False),
    (0, "norm", True),
    (1, "norm", False),
    (2, "norm", True),
    (3, "first", False),
]


@pytest.mark.ranks(2)
def test_what_is_unfrozen_later_is_trained_where_adamw_trains_it():
    """At stage 0 in fp32: all other engines of DeepSpeed's drop for good what is frozen at
    first."""
    for (stage, first, half), kind in itertools.product(THAWED, ("AdamW", "KFACAdamW")):
        engine, frozen = partly_frozen(kind, stage, first, half)
        for p in frozen:
            own_part(p)[own_elements(p) :].fill_(math.nan)
        for step in range(3):
            if step == 1:
                engine.module.requires_grad_(True)
            before = [own_part(p)[: own_elements(p)].clone() for p in frozen]
            train(engine, 1, steps=1, first=step)
            moves = step > 0 and stage == 0 and not half
            for p, was in zip(frozen, before, strict=True):
                now = own_part(p)[: own_elements(p)]
                assert torch.equal(now, was) != moves, (stage, first, half, kind, step)
        engine.destroy()


@pytest.mark.ranks(1)
def test_what_no_row_prepared_steps_along_its_gradient_in_every_stage():
    proving.RAISES, trained = False, []
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        mode = Mode("unprepared", stage, clip=0.0, kfac={"preconditioner": {"kl_clip": 0}})
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False))
        engine = build(mode, 1, model=model)
        kfac = engine.kfac.preconditioner
        for layer in kfac.layers:
            kfac.capture.fail(layer, TypeError("no matrix"))
        x = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))
        engine.backward((engine(x) - 1).square().mean())
        engine.step()
        assert not any(state.preconditioner for state in kfac.state.values())
        trained.append(weights(engine))
        close(trained[-1], trained[0], sums=4 * 4 + 6 + 8, what=f"stage {stage}")
