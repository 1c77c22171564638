"""Values that should not be: in one step of a run, on all ranks or on one; against the same run
without K-FAC.

What plain DeepSpeed with the same optimizer survives, K-FAC has to. After the fault the run goes
on; at its end weights and K-FAC's state must be finite and every layer must move about as in a run
without the fault, or it was said. K-FAC's state must be finite even if the weights of DeepSpeed
alone are not.

DeepSpeed skips a step whose gradients are not finite, but not at stage 0 in fp32, and in bf16 not
without its check: there K-FAC itself meets them.
"""

import math
import pickle
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ds_kfac.curvature.factor import SETTLED
from tests.campaign import harness
from tests.campaign.engines import (
    anywhere,
    engine_of,
    is_finite,
    listening,
    mode_of,
    state_is_finite,
)
from tests.campaign.harness import LOUD, SILENT, SURVIVED, Case, NothingTried, Outcome
from tests.deepspeed.modes import OFFLOAD, Mode
from tests.deepspeed.runs import micro_batches, patched, weights

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


def _scaled(engine, x, y, factor: float):
    return engine(x, y) * factor


def _inputs(engine, x, y, value: float):
    x = x.clone()
    x[0, 0, 0] = value
    return engine(x, y)


def _all_inputs(engine, x, y, value: float):
    return engine(torch.full_like(x, value), y)


def _bias(engine, x, y, value: float):
    """In every element of the gradient of one bias. Two groups have it in another one than its
    weight."""
    return engine(x, y) + value * engine.module.first.bias.sum()


FAULTS = {
    "loss NaN": (_scaled, math.nan),
    "loss inf": (_scaled, math.inf),
    "loss NaN on one rank": (_scaled, math.nan),
    "NaN in the inputs": (_inputs, math.nan),
    "inf in the inputs of one rank": (_inputs, math.inf),
    "1e20 in the inputs": (_inputs, 1e20),
    "spike 1e3": (_scaled, 1e3),
    "spike 1e20": (_scaled, 1e20),
    "spike 1e30": (_scaled, 1e30),
    "loss times 0": (_scaled, 0.0),
    "NaN in one bias": (_bias, math.nan),
    "1e20 in one bias": (_bias, 1e20),
    "inputs all 0": (_all_inputs, 0.0),
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


@dataclass(frozen=True)
class Setting:
    """An engine. ``variant`` is a key of :data:`VARIANTS`; ``clip`` 0 clips nothing."""

    stage: int
    optimizer: str
    dtype: str = "fp32"
    clip: float = 0.5
    variant: str = ""

    def __str__(self) -> str:
        clipped = "clipped" if self.clip else "not clipped"
        variant = f", {self.variant}" if self.variant else ""
        return f"{self.optimizer}, z{self.stage}, {self.dtype}, {clipped}{variant}"

    @property
    def half(self) -> torch.dtype:
        """The dtype of the model."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    def mode(self, *, storm: bool) -> Mode:
        extra = {"fp16": {"enabled": True, **SCALES[storm]}} if self.dtype == "fp16" else {}
        mode = mode_of(self.stage, self.optimizer, self.dtype, self.clip, **extra)
        return replace(mode, **VARIANTS[self.variant])


# In the first three DeepSpeed steps its masters one by one: when the first is stepped, and K-FAC
# runs, the gradients of the others are still raw.
VARIANTS = {
    "": {},
    "two groups": {"groups": "decay"},
    "small sub-groups": {"zero": {"sub_group_size": 100}},
    "two groups, offloaded": {"groups": "decay", "zero": OFFLOAD},
    "two groups, not checked": {
        "groups": "decay",
        "extra": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    },
}

# every fault; and every stage, precision, optimizer and clipping with faults of every kind
COVERED: tuple[tuple[Setting, tuple[str, ...]], ...] = (
    (Setting(2, "KFACAdamW"), tuple(FAULTS)),
    (Setting(2, "KFACAdamW", clip=0.0), (*SOME, *BIAS)),
    (Setting(3, "KFACAdamW"), SOME),
    (Setting(0, "KFACAdamW", clip=0.0), (*SOME, *BIAS)),
    (Setting(2, "AdamW"), (*SOME, *BIAS)),
    (Setting(3, "AdamW", clip=0.0), SOME),
    (Setting(0, "SGD"), SOME),
    (Setting(3, "KFACAdamW", "bf16"), LOW),
    (Setting(2, "SGD", "bf16"), LOW),
    (Setting(2, "KFACAdamW", "fp16"), (STORM, *LOW[:3])),
    (Setting(3, "KFACAdamW", "fp16"), (STORM, "loss inf")),
    (Setting(0, "SGD", "fp16"), (STORM, *LOW[:3])),
    (Setting(2, "AdamW", "fp16"), (STORM, "spike 1e3")),
    (Setting(2, "KFACAdamW", variant="two groups"), (*SOME, *BIAS)),
    (Setting(2, "KFACAdamW", "bf16", variant="two groups"), (*LOW, *BIAS)),
    (Setting(2, "KFACAdamW", "fp16", variant="two groups"), (STORM, "loss inf", "spike 1e3")),
    (Setting(2, "KFACAdamW", "bf16", 0.0, "two groups, not checked"), ("loss NaN", *BIAS)),
    (Setting(2, "SGD", "bf16", 0.5, "two groups, not checked"), ("loss NaN", *BIAS)),
    (Setting(3, "KFACAdamW", variant="small sub-groups"), SOME),
    (Setting(2, "KFACAdamW", variant="two groups, offloaded"), (*SOME, *BIAS)),
    (Setting(2, "AdamW", "bf16", variant="two groups, offloaded"), LOW),
)


def cases() -> list[Case]:
    here = "tests.campaign.numerics:run"
    return [
        Case("numerics", f"{fault}: {setting}", here, (setting, fault))
        for setting, faults in COVERED
        for fault in faults
    ]


@dataclass(frozen=True)
class Run:
    """What is known of a run afterwards.

    Attributes:
        moved: how every parameter moved in the last steps.
        finite: whether K-FAC's state is.
        said: warnings of any rank.
        losses: the losses of all ranks in step :data:`AT`, as text.
        skipped: how many steps DeepSpeed skipped.
    """

    moved: dict[str, torch.Tensor]
    finite: bool
    said: list[str]
    losses: list[str]
    skipped: int


def run(payload: tuple[Setting, str]) -> Outcome:
    setting, fault = payload
    try:
        calm, plain_calm = (_undisturbed(setting, plain=plain) for plain in (False, True))
    except Exception as error:
        raise NothingTried(f"the run without the fault fails: {error}") from error
    faulted, plain = (_train(setting, fault, plain=plain) for plain in (False, True))
    for disturbed, undisturbed in ((faulted, calm), (plain, plain_calm)):
        if fault == STORM and not disturbed.skipped:
            raise NothingTried("no step overflowed")
        if fault != STORM and disturbed.losses == undisturbed.losses:
            raise NothingTried(f"the losses of step {AT} are those of a run without the fault")
    noted = f" (said: {faulted.said[0][:100]})" if faulted.said else ""
    bad = LOUD if faulted.said else SILENT
    if not faulted.finite:
        return bad, "state not finite" + noted
    if not is_finite(faulted.moved):
        if not is_finite(plain.moved):
            return SURVIVED, "weights not finite, as with DeepSpeed alone"
        return bad, "weights not finite" + noted
    for name, moved in faulted.moved.items():
        ratio = _ratio(moved, calm.moved[name])
        usual = _ratio(plain.moved[name], plain_calm.moved[name])
        as_usual = 1 / CALM <= usual <= CALM
        told = f"what it did (DeepSpeed alone: {usual:.3f}){noted}"
        if ratio < STILL and (as_usual or (ratio == 0 and usual >= STILL)):
            return bad, f"{name} moves {ratio:.3f} of {told}"
        if ratio > WILD and usual < CALM:
            return bad, f"{name} moves {ratio:.1f} times {told}"
    return SURVIVED, noted.strip()


def _ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a.norm() / b.norm().clamp(min=1e-12))


def _undisturbed(setting: Setting, *, plain: bool) -> Run:
    """Once a campaign."""
    if harness.SHARED is None:
        return _train(setting, None, plain=plain)
    path = harness.SHARED / f"{setting} {plain} {dist.get_rank()}"
    if not path.exists():
        path.write_bytes(pickle.dumps(_train(setting, None, plain=plain)))
    return pickle.loads(path.read_bytes())


def _train(setting: Setting, fault: str | None, *, plain: bool) -> Run:
    storm = fault == STORM
    mode, steps = setting.mode(storm=storm), STEPS + 20 * storm
    act, value = FAULTS.get(fault or "", (None, 0.0))
    if "one rank" in (fault or "") and dist.get_rank() != 1:
        act = None
    losses: list[str] = []
    with listening() as said, patched(mode):
        engine = engine_of(mode, setting.optimizer, plain=plain)
        said.clear()
        for step in range(steps):
            if step == steps - LAST:
                before = weights(engine)
            if step == AT and not plain and not storm:
                _check_that_all_is_due(engine)
            for x, y in micro_batches(step, 1):
                x = x.to(setting.half)
                loss = act(engine, x, y, value) if act and step == AT else engine(x, y)
                if storm and step % 8 in (5, 6, 7) and step < STEPS:
                    loss = loss * float("inf")
                if step == AT:
                    losses.append(str(float(loss.detach())))
                engine.backward(loss)
                engine.step()
        after, skipped = weights(engine), engine.skipped_steps
        finite = plain or state_is_finite(engine)
        engine.destroy()
    moved = {name: after[name] - before[name] for name in after}
    return Run(moved, finite, anywhere(said), anywhere(losses), skipped)


def _check_that_all_is_due(engine) -> None:
    """The fault is to meet a step that captures and refreshes, and factors that know what a spike
    is."""
    for kfac in engine.kfac.job.preconditioners:
        if not (kfac.due.capture and kfac.due.refresh and kfac.steps > SETTLED):
            raise NothingTried(f"step {AT} is number {kfac.steps}; due is {kfac.due}")
