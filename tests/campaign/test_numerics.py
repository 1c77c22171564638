"""Values that should not be: in one step of a run, on all ranks or on one; against the same run
without K-FAC.

What plain DeepSpeed with the same optimizer survives, K-FAC has to. After the fault the run goes
on; at its end weights and K-FAC's state must be finite and every layer must move about as in a run
without the fault. K-FAC's state must be finite even if the weights of DeepSpeed alone are not.

DeepSpeed skips a step whose gradients are not finite, but not at stage 0 in fp32, and in bf16 not
without its check: there K-FAC itself meets them.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from ds_kfac.curvature.factor import SETTLED
from tests.campaign.engines import engine_of, is_finite, mode_of, state_is_finite
from tests.deepspeed.modes import OFFLOAD, Mode
from tests.deepspeed.runs import micro_batches, patched, weights
from tests.ranks import of_ranks

STEPS, AT, LAST = 60, 12, 6
"""Steps of a run, where the fault is (a refresh is due, and factors stand on more than ``SETTLED``
batches: in those nothing is called a spike yet), and over how many last steps movement is measured:
so late that SGD's momentum has forgotten the clipped step itself, 0.9 ** 42 = 0.01 of it, and what
is left is lasting."""
STILL, WILD = 0.1, 10.0
"""A layer that moves less or more than this part of what it does without fault has stalled or run
away..."""
CALM = 3.0
"""...unless plain DeepSpeed's moves by another factor than this, too."""


def scaled(engine, x, y, factor: float):
    return engine(x, y) * factor


def one_input(engine, x, y, value: float):
    x = x.clone()
    x[0, 0, 0] = value
    return engine(x, y)


def all_inputs(engine, x, y, value: float):
    return engine(torch.full_like(x, value), y)


def bias(engine, x, y, value: float):
    """In every element of the gradient of one bias. Two groups have it in another one than its
    weight."""
    return engine(x, y) + value * engine.module.first.bias.sum()


FAULTS = {
    "loss NaN": (scaled, math.nan),
    "loss inf": (scaled, math.inf),
    "loss NaN on one rank": (scaled, math.nan),
    "NaN in the inputs": (one_input, math.nan),
    "inf in the inputs of one rank": (one_input, math.inf),
    "1e20 in the inputs": (one_input, 1e20),
    "spike 1e3": (scaled, 1e3),
    "spike 1e20": (scaled, 1e20),
    "spike 1e30": (scaled, 1e30),
    "loss times 0": (scaled, 0.0),
    "NaN in one bias": (bias, math.nan),
    "1e20 in one bias": (bias, 1e20),
    "inputs all 0": (all_inputs, 0.0),
}
"""What is done to a step, by a name that says if it is done on one rank only."""
LOW = ("loss NaN", "loss inf", "loss NaN on one rank", "spike 1e3", "spike 1e20", "loss times 0")
SOME = ("loss NaN", "inf in the inputs of one rank", "spike 1e3", "spike 1e20", "inputs all 0")
BIAS = ("NaN in one bias", "1e20 in one bias")
STORM = "overflow storm"
"""Three steps of every eight overflow, while the loss scale begins far too high."""
SCALES = {
    False: {"initial_scale_power": 8},
    True: {"initial_scale_power": 32, "loss_scale_window": 3, "hysteresis": 1},
}
"""The loss scale of fp16, without a storm and in one."""

# In the first three DeepSpeed steps its masters one by one: when the first is stepped, and K-FAC
# runs, the gradients of the others are still raw.
GROUPS = {"groups": "decay"}
SUB_GROUPS = {"zero": {"sub_group_size": 100}}
OFFLOADED = {**GROUPS, "zero": OFFLOAD}
UNCHECKED = {**GROUPS, "extra": {"bf16": {"enabled": True, "check_grad_overflow": False}}}

# every fault; and every stage, precision, optimizer and clipping with faults of every kind
COVERED: dict[str, tuple[Mode, tuple[str, ...]]] = {
    "adam-z2": (mode_of(2, "KFACAdamW"), tuple(FAULTS)),
    "adam-z2-noclip": (mode_of(2, "KFACAdamW", clip=0.0), (*SOME, *BIAS)),
    "adam-z3": (mode_of(3, "KFACAdamW"), SOME),
    "adam-z0-noclip": (mode_of(0, "KFACAdamW", clip=0.0), (*SOME, *BIAS)),
    "z2": (mode_of(2, "AdamW"), (*SOME, *BIAS)),
    "z3-noclip": (mode_of(3, "AdamW", clip=0.0), SOME),
    "sgd-z0": (mode_of(0, "SGD"), SOME),
    "adam-z3-bf16": (mode_of(3, "KFACAdamW", "bf16"), LOW),
    "sgd-z2-bf16": (mode_of(2, "SGD", "bf16"), LOW),
    "adam-z2-fp16": (mode_of(2, "KFACAdamW", "fp16"), (STORM, *LOW[:3])),
    "adam-z3-fp16": (mode_of(3, "KFACAdamW", "fp16"), (STORM, "loss inf")),
    "sgd-z0-fp16": (mode_of(0, "SGD", "fp16"), (STORM, *LOW[:3])),
    "z2-fp16": (mode_of(2, "AdamW", "fp16"), (STORM, "spike 1e3")),
    "adam-z2-groups": (mode_of(2, "KFACAdamW", **GROUPS), (*SOME, *BIAS)),
    "adam-z2-bf16-groups": (mode_of(2, "KFACAdamW", "bf16", **GROUPS), (*LOW, *BIAS)),
    "adam-z2-fp16-groups": (
        mode_of(2, "KFACAdamW", "fp16", **GROUPS),
        (STORM, "loss inf", "spike 1e3"),
    ),
    "adam-z2-bf16-noclip-unchecked": (
        mode_of(2, "KFACAdamW", "bf16", 0.0, **UNCHECKED),
        ("loss NaN", *BIAS),
    ),
    "sgd-z2-bf16-unchecked": (mode_of(2, "SGD", "bf16", **UNCHECKED), ("loss NaN", *BIAS)),
    "adam-z3-sub_groups": (mode_of(3, "KFACAdamW", **SUB_GROUPS), SOME),
    "adam-z2-offload": (mode_of(2, "KFACAdamW", **OFFLOADED), (*SOME, *BIAS)),
    "z2-bf16-offload": (mode_of(2, "AdamW", "bf16", **OFFLOADED), LOW),
}
CASES = [(name, fault) for name, (_, faults) in COVERED.items() for fault in faults]


@dataclass(frozen=True)
class Run:
    """What is known of a run afterwards.

    Attributes:
        moved: how every parameter moved in the last steps.
        finite: whether K-FAC's state is.
        losses: the losses of all ranks in step :data:`AT`.
        skipped: how many steps DeepSpeed skipped.
    """

    moved: dict[str, torch.Tensor]
    finite: bool
    losses: list[str]
    skipped: int


@cache
def train(setting: str, fault: str, *, plain: bool) -> Run:
    """A run without a fault is made once."""
    mode, storm = COVERED[setting][0], fault == STORM
    if mode.dtype == "fp16":
        mode = replace(mode, extra={"fp16": {"enabled": True, **SCALES[storm]}})
    act, value = FAULTS.get(fault, (None, 0.0))
    if "one rank" in fault and dist.get_rank() != 1:
        act = None
    steps, losses = STEPS + 20 * storm, []
    with patched(mode):
        engine = engine_of(mode, plain=plain)
        for step in range(steps):
            if step == steps - LAST:
                before = weights(engine)
            if step == AT and not plain and not storm:
                for kfac in engine.kfac.job.preconditioners:
                    assert kfac.due.capture and kfac.due.refresh and kfac.steps > SETTLED
            for x, y in micro_batches(step, 1):
                x = x.to(engine.get_data_types()[0])
                loss = act(engine, x, y, value) if act and step == AT else engine(x, y)
                if storm and step % 8 in (5, 6, 7) and step < STEPS:
                    loss = loss * math.inf
                if step == AT:
                    losses = of_ranks(str(float(loss.detach())))
                engine.backward(loss)
                engine.step()
        after, skipped = weights(engine), engine.skipped_steps
        finite = plain or state_is_finite(engine)
        engine.destroy()
    moved = {name: after[name] - before[name] for name in after}
    return Run(moved, finite, losses, skipped)


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a.norm() / b.norm().clamp(min=1e-12))


@pytest.mark.ranks(2, timeout=3600)
@pytest.mark.parametrize(("setting", "fault"), CASES)
def test_what_deepspeed_alone_survives_leaves_state_finite_and_layers_moving(setting, fault):
    calm, plain_calm = (train(setting, "", plain=plain) for plain in (False, True))
    faulted, plain = (train(setting, fault, plain=plain) for plain in (False, True))
    for run, without in ((faulted, calm), (plain, plain_calm)):
        happened = run.skipped if fault == STORM else run.losses != without.losses
        assert happened, "the fault did not take place"
    assert faulted.finite, "K-FAC's state is not finite"
    if not is_finite(faulted.moved):
        assert not is_finite(plain.moved), "those of DeepSpeed alone are finite"
        return
    for name, moved in faulted.moved.items():
        ours = ratio(moved, calm.moved[name])
        usual = ratio(plain.moved[name], plain_calm.moved[name])
        as_usual = 1 / CALM <= usual <= CALM
        stalled = ours < STILL and (as_usual or (ours == 0 and usual >= STILL))
        runs_away = ours > WILD and usual < CALM
        assert not (stalled or runs_away), f"{name} moves {ours} of what it did; alone {usual}"
