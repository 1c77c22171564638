"""How many operations a plain step and one with a factor update are made of, and how many bytes
their operands have: a GPU's launches, and its passes over memory.

The layers of GPT-2 small an eighth as wide, those of one shape together as on a GPU, on a CPU. An
operation is what torch dispatches without views and allocations, or an op of
:mod:`ds_kfac.ops.dispatch`, for which a GPU has a kernel. Of each but matrix products the bytes of
all tensors that it reads or writes count, whether a cache holds them or not. DeepSpeed's own part
and the optimizer's are not in it.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.estimate.estimates import FP32
from ds_kfac.ops import dispatch, functional
from ds_kfac.update import rotation
from tests.choices import AT_ONCE
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build
from tests.ranks import run_ranks
from tests.tape import taped

pytestmark = pytest.mark.distributed
WIDTH, BLOCKS, ROWS = 96, 12, 64
STEPS = 9
"""The last one is counted; the first ones prove the layers' rows."""
NARROWER = 8
"""Than GPT-2 small: what is in memory together is as many layers as there."""
PLAIN, UPDATE = 1000, STEPS - 1
"""Intervals with which the last step is a plain one, and one that updates factors."""
MOST = {PLAIN: (246, 64.9), UPDATE: (376, 81.0)}
"""Operations and bytes an element. Only to be made smaller."""
KFAC = {"eigenbasis": {"refresh_interval": 1000}, "burn_in": {"steps": 0}, "report": "none"}
FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "is_set_to",
    "_local_scalar_dense",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
"""Allocations, and what only a CPU asks of a scalar."""
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
ONLY_WRITE = {"copy_", "_foreach_copy_", "fill_", "zero_"}
CHANGED = {
    "ema_update_": ("averages_P", "updates"),
    "adam_step_": ("first_nOI", "second_nOI", "updates_n"),
}
"""What ops of ours read and write, of those that a step has outside of the hooks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q * k) + v)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Operations(TorchDispatchMode):
    """Those of torch, and of ours as one each.

    Attributes:
        count: operations seen.
        nbytes: bytes of their operands, matrix products left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.nbytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        schema = function._schema
        result = function(*arguments, **(keywords or {}))
        view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        name = schema.name.removeprefix("aten::")
        if not view and name not in FREE:
            given = dict(zip((each.name for each in schema.arguments), arguments, strict=False))
            changed = {
                each.name
                for each in schema.arguments
                if each.alias_info is not None and each.alias_info.is_write and each.name != "out"
            }
            self.note(name, given | (keywords or {}), changed, result)
        return result

    def note(
        self, name: str, arguments: dict[str, Any], changed: Collection[str], result: Any
    ) -> None:
        """``changed``: arguments that are read and written."""
        self.count += 1
        if name in PRODUCTS:
            return
        operands: list[Tensor] = []
        for argument, value in arguments.items():
            tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
            operands += tensors
            twice = argument in changed and name not in ONLY_WRITE
            self.nbytes += (2 if twice else 1) * sum(map(touched, tensors))
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.nbytes += sum(touched(x) for x in results if not any(x is y for y in operands))


def touched(x: Tensor) -> int:
    """Bytes of what a tensor shows; of what is expanded once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * torch.Size(sizes).numel()


@contextmanager
def kernels(operations: Operations) -> Iterator[None]:
    """As if the CPU had a kernel for every op."""

    def counted(op: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():
                found = getattr(functional, op)(*arguments, **options)
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            assert all(x.is_contiguous() or x is tensors[0] for x in tensors), (
                f"{op}: a kernel takes no strides"
            )
            if operations in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
                bound = (
                    inspect.signature(getattr(functional, op)).bind(*arguments, **options).arguments
                )
                operations.note(op, bound, CHANGED.get(op, ()), found)
            return found

        return run

    with patch.dict(
        dispatch._choices,
        {"cpu": dispatch.BackendChoice({op: ("counted", counted(op)) for op in dispatch.OPS})},
    ):
        yield


def worker(interval: int) -> tuple[int, float]:
    """Operations of the last step, and bytes an element."""
    mode, operations = BY_NAME["adam-z2"], Operations()
    limit = rotation.BATCHED // NARROWER**2
    torch.manual_seed(0)
    with patch.object(rotation, "BATCHED", limit):
        kfac_block = {
            **KFAC,
            "factor": {"update_interval": interval},
            "plan": {"batched": True, **AT_ONCE},
        }
        engine = build(mode, 1, kfac=kfac_block, model=Blocks())
        kfac = engine.kfac.preconditioner
        assert len(kfac.worker_layers) == 4 * BLOCKS and len(kfac.direction.layer_groups) == 4
        with kernels(operations):
            for step in range(STEPS):
                engine.backward(engine(torch.randn(ROWS, WIDTH)))
                if step == STEPS - 1:
                    assert bool(kfac.due.capture) == (interval == UPDATE) and not kfac.due.refresh
                    assert kfac.capture.proof is None and all(
                        state.basis is not None for state in kfac.state.values()
                    )
                    for name in ("compute_results", "scatter"):
                        setattr(kfac, name, during(operations, getattr(kfac, name)))
                engine.step()
    numel = sum(layer.numel for layer in kfac.worker_layers)
    return operations.count, operations.nbytes / numel


def during(operations: Operations, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with operations:
            return method(*arguments, **options)

    return run


@pytest.mark.parametrize("interval", [PLAIN, UPDATE], ids=["plain", "factor update"])
def test_a_step_has_no_more_operations_and_passes_than_it_had(interval):
    (found,) = run_ranks("tests.step.test_operations:worker", world=1, payload=interval)
    operations, nbytes = found
    assert operations <= MOST[interval][0] and nbytes <= MOST[interval][1], (operations, nbytes)


def recorded_worker(_) -> float:
    """Bytes an element of a plain step that takes gradients from fixed places and puts results
    there, as one that is recorded."""
    with taped(steady=STEPS + 1):  # in fixed places, but not yet repeated
        return worker(PLAIN)[1]


def test_the_estimate_counts_the_passes_of_a_recorded_step():
    (nbytes,) = run_ranks("tests.step.test_operations:recorded_worker", world=1)
    assert KFACAdamWFacts.passes == round(nbytes / FP32)
