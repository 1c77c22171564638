"""What a step costs: what it holds beside the state, counted tensor by tensor, against the bounds
of docs/explanation/scaling.md; and that it neither asks the device nor sends it numbers."""

import traceback
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_kfac.directions import facts
from ds_kfac.directions.kfac_adamw import facts as adam_facts
from ds_kfac.estimate import estimates
from ds_kfac.estimate.estimates import BESIDE, Estimate
from ds_kfac.estimate.subject import Subject
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.step import preconditioner
from ds_kfac.update import rotation
from tests.choices import AT_ONCE, chosen
from tests.deepspeed.features import CORRECTED, merged
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, micro_batches, patched, train


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still there, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        there = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # not a view
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in there:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known and nbytes:
            self._known[key] = nbytes
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)


NO_G = {"factor": {"fisher": "activations_only"}}
BOTH = {"factor": {"fisher": "empirical"}}
WORKERS = {"assignment": {"gradient_worker_fraction": 1.0}, "communication": {"dtype": "bf16"}}
ADAM = {"adam": True, "orthogonal": True, "kfac": NO_G}
STEPS = [
    Mode("Adam z0", 0, **ADAM),
    Mode("all workers z0", 0, kfac=WORKERS),
    Mode("Adam z3 bf16, large", 3, "bf16", **ADAM),
    Mode("Adam z2, batched, both sides", 2, **{**ADAM, "kfac": BOTH}),
    Mode("gradient z2, batched, corrected", 2, kfac=CORRECTED),
]
SIDES = [96 + 2 * index for index in range(25)]
"""Of layers of which none is like another: what a single layer's products copy is little, and none
are batched."""
BATCHED = 8
"""Layers of one batch, of 24 on a rank."""
ROWS = 4
IN_PLACE = "gradient z2, batched, corrected"
"""The mode in which a batch's gradients lie at equal distances in DeepSpeed's memory, and no
clipping is to come: the step reads them there. The estimate counts a copy, which other models'
layouts need."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [mode.name for mode in STEPS])
def test_a_step_holds_what_the_estimate_says(name):
    """Beside the state, from the first message on."""
    mode = next(mode for mode in STEPS if mode.name == name)
    batched = "batched" in name
    often = {"factor": {"update_interval": 2}, "eigenbasis": {"refresh_interval": 2}}
    plan = {"plan": {**AT_ONCE, "batched": batched}, "burn_in": {"steps": 0}}
    mode = replace(mode, kfac=merged(mode.kfac, often, plan))
    torch.manual_seed(0)
    all_sides = [[SIDES[0]] * 2] * 48 if batched else pairwise(SIDES)
    model = nn.Sequential(*(nn.Linear(*sides, bias=False) for sides in all_sides))
    config = mode.config(1)
    for module in (rotation, facts, adam_facts, estimates):
        module.AT_ONCE = 1 << 12 if "large" in name else 1 << 22
    with patch.object(rotation, "BATCHED", BATCHED * SIDES[0] ** 2):
        with chosen(config["kfac"]) as block:
            subject = Subject(model, {**config, "kfac": block})
        captured, plain, kfac = measured(mode, model)
        with chosen(config["kfac"]):
            estimate = Estimate(subject, kfac.plan.assignment.work.costs, 2, ROWS)
            memory = estimate.memory
    assert estimate.plan.assignment == kfac.plan.assignment
    own = {kind: int(nbytes[dist.get_rank()]) for kind, nbytes in memory.items()}
    layer = 4 * max(parameter.numel() for parameter in model.parameters())
    of_plain = max(own[kind] for kind in ("gradients", "workspace", "results"))
    of_plain -= BATCHED * layer * (name == IN_PLACE)
    for found, said in ((captured, own[BESIDE]), (plain, of_plain)):
        # a layer is copied in its products and moments
        assert 0.9 * said <= found <= 1.02 * said + layer, (found, said)


def measured(mode: Mode, model: nn.Module):
    """What captured and other steps hold, and the preconditioner."""
    engine = build(mode, model=model)
    job, peaks, before, live = engine.kfac.job, [], [], Live()
    plain = job.step

    def watched() -> None:
        before.append(live.now)
        live.peak = live.now
        plain()
        peaks.append(live.peak)

    for step in range(7):
        x = torch.randn(ROWS, SIDES[0], generator=torch.Generator().manual_seed(step))
        loss = engine(x.to(engine.get_data_types()[0])).float().square().mean()
        # the first one is another one
        job.step = watched if step else job.step
        with live if step else nullcontext():  # counting takes most of the time
            engine.backward(loss)
            engine.step()
    # steps 4 and 6 capture and replace what was counted; before the others there are
    # DeepSpeed's gradients; gloo's threads may let go of a message late
    captured = min(peaks[step - 1] - before[step - 2] for step in (4, 6))
    others = min(peaks[step - 1] - before[step - 1] for step in (3, 5))
    return captured, others, job.preconditioners[0]


FROM_HOST = {"tensor", "new_tensor", "as_tensor", "from_numpy"}
TO_HOST = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
ASKED = "z0-groups z2 z3 z0-bf16 z2-fp16 z0-fp16 z1-bf16-accum32 adam-z0 adam-z2 adam-z3"
ASKED_CASES = [
    *((name, {}) for name in ASKED.split()),
    ("z2", merged(CORRECTED, {"damping": {"kind": "relative", "value": 1.0}})),
    ("z0", {"preconditioner": {"kl_clip": 0.001}, "plan": {"batched": True}}),
]
INTERVALS = {
    "factor": {"update_interval": 3},
    "eigenbasis": {"refresh_interval": 6},
    "burn_in": {"steps": 0},
    "ops": {"backend": "torch"},
}


def _where() -> str:
    frames = [f for f in traceback.extract_stack() if "/ds_kfac/" in f.filename]
    frames = [f for f in frames if "/tests/" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "elsewhere"


FOUND: set[str] = set()
"""What waits for the device."""


class Calls(TorchFunctionMode):
    """What Python asks torch for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        of_tensor = bool(args) and isinstance(args[-1], torch.Tensor)
        if name in TO_HOST or (name in FROM_HOST and not of_tensor):
            FOUND.add(f"{name} at {_where()}")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """What torch does about it: anything whose result's value or shape the host must know."""

    TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.TAGS & set(func.tags) or func.name().startswith("aten::lift_fresh"):
            FOUND.add(f"{func.name()} at {_where()}")
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "blocks"), ASKED_CASES)
def test_an_ordinary_step_neither_waits_for_the_device_nor_sends_it_numbers(name, blocks):
    mode = BY_NAME[name]
    engine = build(mode, kfac=merged(KFAC, mode.kfac, INTERVALS, blocks))
    with patched(mode):
        train(engine, 1, steps=2)
        for x, y in micro_batches(2, 1):
            engine.backward(engine(x.to(engine.get_data_types()[0]), y))
        job = engine.kfac.job
        assert not job.active
        plain = job.step

        def watched() -> None:
            with Calls(), Operations():
                plain()

        with patch.object(job, "step", watched):
            FOUND.clear()
            engine.step()
    assert not FOUND


class Timed(HostCopy):
    """Records the step of each copy and the step in which the host reads it."""

    step = 0
    ages: list[int] = []

    def __init__(self, tensor):
        super().__init__(tensor)
        self.made = Timed.step

    def tolist(self):
        Timed.ages.append(Timed.step - self.made)
        return super().tolist()


@pytest.mark.ranks(2)
def test_a_step_does_not_wait_for_the_counts_of_its_own_update():
    """In a run that captures in each step and leaves the rows to some ranks."""
    with patch.object(preconditioner, "HostCopy", Timed):
        engine = build(BY_NAME["z2"], kfac=merged(KFAC, {"factor": {"rows": 3}}))
        for Timed.step in range(6):
            train(engine, 1, steps=1, first=Timed.step)
    assert engine.kfac.preconditioner.plan.contributors.counts
    assert Timed.ages and min(Timed.ages) >= 1
