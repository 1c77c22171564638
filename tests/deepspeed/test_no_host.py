"""A step without capture and refresh asks the device nothing and sends it nothing from a Python
list, in any mode: what a CUDA graph, which would record wrong numbers or fail, needs; and what
keeps the host ahead of a GPU."""

import traceback
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.step import preconditioner
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, patched, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
FROM_HOST = {"tensor", "new_tensor", "as_tensor", "from_numpy"}
TO_HOST = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
CORRECTED = {"eigenvalues": "corrected", "kl_clip": 0.001}
CASES = [
    *(
        (name, {})
        for name in (
            "z0",
            "z0-groups",
            "z1",
            "z2",
            "z2-groups",
            "z3",
            "z0-bf16",
            "z2-bf16",
            "z2-fp16",
        )
    ),
    *(
        (name, {})
        for name in ("z0-fp16", "z1-bf16-accum32", "adam-z0", "adam-z2", "adam-z3", "adam-z2-fp16")
    ),
    ("z2", {"preconditioner": CORRECTED, "damping": {"kind": "relative", "value": 1.0}}),
    ("z0", {"preconditioner": {"kl_clip": 0.001}, "plan": {"batched": True}}),
]


def _where() -> str:
    frames = [
        f
        for f in traceback.extract_stack()
        if "ds_kfac" in f.filename and "tests" not in f.filename
    ]
    return (
        f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "elsewhere"
    )


class Calls(TorchFunctionMode):
    """What Python asks torch for."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in TO_HOST or (
            name in FROM_HOST and not (args and isinstance(args[-1], torch.Tensor))
        ):
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


def _watched(step, found: set[str]) -> None:
    with Calls(found), Operations(found):
        step()


def worker(cases) -> dict:
    results = {}
    intervals = {
        "factor": {**KFAC["factor"], "update_interval": 3},
        "eigenbasis": {"refresh_interval": 6},
        "burn_in": {"steps": 0},
    }
    for index, (name, options) in enumerate(cases):
        mode = BY_NAME[name]
        block = {
            **KFAC,
            **intervals,
            "burn_in": {"steps": 0},
            "ops": {"backend": "torch"},
            **mode.kfac,
            **options,
        }
        engine = build(mode, 1, kfac=block)
        with patched(mode):
            train(engine, 1, steps=2)
            for x, y in micro_batches(2, 1):
                engine.backward(engine(x.to(engine.get_data_types()[0]), y))
        assert not engine.kfac.job.active
        found: set[str] = set()
        job = engine.kfac.job
        with patch.object(job, "step", partial(_watched, job.step, found)), patched(mode):
            engine.step()
        results[index, name] = sorted(found)
        if index == 0:  # that the modes see anything at all
            total = torch.ones(3)
            with Calls(found), Operations(found):
                bool(total.sum() > 0), total.new_tensor([1.0]), total.nonzero()
            results["probe"] = sorted(call.split(" at ")[0] for call in found)
        engine.destroy()
    return results


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


def counts_worker(_) -> list[int]:
    """How many steps old the counts of updates are that the host reads, in a run that captures in
    each step and leaves the rows to some ranks."""
    block = {**KFAC, "factor": {**KFAC["factor"], "rows": 3}, "report": "none"}
    with patch.object(preconditioner, "HostCopy", Timed):
        engine = build(BY_NAME["z2"], 1, kfac=block)
        for step in range(6):
            Timed.step = step
            train(engine, 1, steps=1, first=step)
        assert engine.kfac.preconditioner.plan.contributors.counts
    engine.destroy()
    return Timed.ages


def test_a_step_does_not_wait_for_the_counts_of_its_own_update():
    for ages in run_ranks("tests.deepspeed.test_no_host:counts_worker", world=2):
        assert ages and min(ages) >= 1, ages


@pytest.mark.parametrize("world", [1, 2])
def test_an_ordinary_step_neither_waits_for_the_device_nor_sends_it_numbers(world):
    for result in run_ranks("tests.deepspeed.test_no_host:worker", world=world, payload=CASES):
        probe = result.pop("probe")
        assert {"__bool__", "new_tensor", "aten::_local_scalar_dense", "aten::nonzero"} <= set(
            probe
        ), probe
        assert not any(result.values()), result
