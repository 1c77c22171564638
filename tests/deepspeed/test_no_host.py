"""A step without capture and refresh asks the device nothing and sends it nothing from a Python
list, in any mode: what a CUDA graph, which would record wrong numbers or fail, needs; and what
keeps the host ahead of a GPU."""

import traceback
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.step import preconditioner
from tests.deepspeed.features import CORRECTED, merged
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, patched, train

FROM_HOST = {"tensor", "new_tensor", "as_tensor", "from_numpy"}
TO_HOST = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
MODES = "z0 z0-groups z1 z2 z2-groups z3 z0-bf16 z2-bf16 z2-fp16 z0-fp16 z1-bf16-accum32"
MODES += " adam-z0 adam-z2 adam-z3 adam-z2-fp16"
CASES = [
    *((name, {}) for name in MODES.split()),
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


class Calls(TorchFunctionMode):
    """What Python asks torch for."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        of_tensor = bool(args) and isinstance(args[-1], torch.Tensor)
        if name in TO_HOST or (name in FROM_HOST and not of_tensor):
            self.found.add(f"{name} at {_where()}")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """What torch does about it: anything whose result's value or shape the host must know."""

    TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.TAGS & set(func.tags) or func.name().startswith("aten::lift_fresh"):
            self.found.add(f"{func.name()} at {_where()}")
        return func(*args, **(kwargs or {}))


def watched(action) -> set[str]:
    found: set[str] = set()
    with Calls(found), Operations(found):
        action()
    return found


@pytest.mark.ranks(1)
def test_what_waits_for_the_device_is_seen():
    total = torch.ones(3)
    found = watched(lambda: (bool(total.sum() > 0), total.new_tensor([1.0]), total.nonzero()))
    assert {"__bool__", "new_tensor", "aten::_local_scalar_dense", "aten::nonzero"} <= {
        call.split(" at ")[0] for call in found
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "blocks"), CASES)
def test_an_ordinary_step_neither_waits_for_the_device_nor_sends_it_numbers(name, blocks, world):
    mode = BY_NAME[name]
    engine = build(mode, kfac=merged(KFAC, mode.kfac, INTERVALS, blocks))
    with patched(mode):
        train(engine, 1, steps=2)
        for x, y in micro_batches(2, 1):
            engine.backward(engine(x.to(engine.get_data_types()[0]), y))
        job, found = engine.kfac.job, set()
        assert not job.active
        plain = job.step
        with patch.object(job, "step", lambda: found.update(watched(plain))):
            engine.step()
    assert not found


@pytest.mark.ranks(1)
def test_a_step_that_is_not_due_has_four_products_a_layer_and_no_decomposition():
    engine = build(BY_NAME["z2"], kfac=merged(KFAC, INTERVALS))
    train(engine, 1, steps=2)
    for x, y in micro_batches(2, 1):
        engine.backward(engine(x, y))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        engine.step()
    counts = {event.key: event.count for event in trace.key_averages()}
    assert counts["aten::mm"] == 4 * len(engine.kfac.preconditioner.owned)
    assert not any("eigh" in key for key in counts)


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
