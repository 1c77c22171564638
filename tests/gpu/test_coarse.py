"""Every engine mode at a GPU's default precision, TF32 and fp16, within a bound that follows from
these roundings.

By default a GPU multiplies what preconditions a gradient in TF32, which rounds operands to 10 bits,
and orthogonalizes in fp16. Statistics, decompositions, forward and backward stay as they were. So
the oracle is run again with its products so rounded, with its rows in several orders; the farthest
of these runs says what rounding alone may do.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests import oracle
from tests.deepspeed import runs
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.test_modes import check
from tests.gpu.test_modes import at_once, dealt
from tests.ranks import run_alone
from tests.spread import FACTOR, FLOOR, OTHERS, PLAIN, difference

TARGET = "tests.gpu.test_coarse:compare"
LARGEST = 0.5
"""A bound above which nothing is held: a run without K-FAC is about 1 from one with it."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
ORDERS = (PLAIN, *OTHERS[:3])


def in_tf32(x: Tensor) -> Tensor:
    """fp32 rounded to the nearest of 10 bits, ties to even; other dtypes as they are."""
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    kept = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), kept.view(torch.float32), x)


def in_fp16(x: Tensor) -> Tensor:
    return x.half().float() if x.dtype == torch.float32 else x


class Rounded(TorchDispatchMode):
    """Products of matrices have rounded operands, and, in fp16, a rounded result. ``half``: now in
    fp16."""

    half = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op not in PRODUCTS:
            return op(*args, **(kwargs or {}))
        rounded = in_fp16 if self.half else in_tf32
        result = op(*(rounded(x) if isinstance(x, Tensor) else x for x in args), **(kwargs or {}))
        return in_fp16(result) if self.half else result


@contextlib.contextmanager
def rounded_oracle() -> Iterator[None]:
    """What the oracle does with gradients is rounded; its statistics are not."""
    mode, step, adam = Rounded(), oracle.ReferenceKFAC.step, oracle.ReferenceKFAC.adam
    moments, orthogonalized = oracle._Layer.moments, oracle._orthogonalized

    def within(function, context):
        def run(*given, **named):
            with context():
                return function(*given, **named)

        return run

    rounded = partial(within, context=lambda: mode)
    exact = partial(within, context=_disable_current_modes)

    def halved(*given):
        mode.half = True
        try:
            return orthogonalized(*given)
        finally:
            mode.half = False

    with (
        patch.object(oracle.ReferenceKFAC, "step", rounded(step)),
        patch.object(oracle.ReferenceKFAC, "adam", rounded(adam)),
        patch.object(oracle._Layer, "moments", exact(moments)),
        patch.object(oracle, "_orthogonalized", halved),
    ):
        yield


def compare(cases) -> dict:
    """As ``tests.deepspeed.runs.compare``, at the precision that the device has by default; the
    bound is of the rounded runs' distance from the plain one."""
    results, world = {}, dist.get_world_size()
    for name, accumulation in cases:
        mode = BY_NAME[name]
        preconditioner = {**mode.kfac_block["preconditioner"], "precision": None}
        mode = replace(mode, kfac={**mode.kfac, "preconditioner": preconditioner})
        initial = runs.weights(runs.build(mode, accumulation))
        with patch.dict(BY_NAME, {name: mode}):
            result = runs.compared(name, accumulation)
        plain, spread = runs.expected(mode, accumulation, world, initial).weights, 0.0
        for variation in ORDERS:
            with rounded_oracle():
                run = runs.reference(mode, accumulation, world, initial, variation=variation)
            spread = max(spread, difference(run, plain, initial))
        bound = max(FACTOR * spread + FLOOR, result["bound"])
        results[name, accumulation] = {**result, "fp32 bound": result["bound"], "bound": bound}
    return results


@pytest.mark.distributed
def test_fp32_is_within_the_bound_and_the_bound_holds_something():
    """On a CPU, whose default is fp32."""
    results = run_alone(TARGET, device="cpu", payload=[(name, 4) for name in ("z1", "adam-z1")])
    for case, result in results.items():
        check(case, result)
        assert 10 * result["fp32 bound"] < result["bound"] < LARGEST, (case, result)


@pytest.mark.gpu
@pytest.mark.distributed
def test_every_engine_mode_is_within_the_bound_of_the_default_precision():
    results = at_once(lambda cases: run_alone(TARGET, device="cuda", payload=cases), dealt())
    for case, result in results.items():
        check(case, result)
