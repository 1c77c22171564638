"""The calls of the GPU tests, by GPU code on the CPU: Triton interpreted, CUDA C++ as loops."""

import sys
from importlib.util import find_spec

import pytest
import torch

from ds_kfac.ops import functional
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.triton import MODULES
from tests.gpu.calls import Sizes
from tests.gpu.layer_calls import CALLS, calls_of
from tests.gpu.targets import configured, copied, problems
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted

FEW = Sizes((1, 33), (1, 2, 63), (1, 2, 63), ((1, 1), (63, 129)))


@pytest.fixture(scope="module")
def triton_ops():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: its kernels are not tested")
    files = sorted(set(MODULES.values()))
    with interpreted(*files) as modules:
        by_file = dict(zip(files, modules, strict=True))
        yield {op: getattr(by_file[file], op) for op, file in MODULES.items()}


@pytest.fixture(scope="module")
def cuda_ops():
    ops = emulated()
    return {op: getattr(ops, op) for op in CudaOps.OPS}


def check(function, op: str) -> None:
    wrong = []
    for call in calls_of(op, "cpu", FEW):
        arguments = copied(call.arguments)
        wrong += problems(call, function(*arguments, **call.options), arguments)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", MODULES)
def test_triton_interpreted(triton_ops, op, poisoned):
    check(triton_ops[op], op)


@pytest.mark.parametrize("descriptor", [False, True])
def test_a_syrk_by_a_given_configuration(triton_ops, descriptor):
    syrk = sys.modules["ds_kfac.ops.triton.syrk"]
    config = syrk.SyrkConfig(64, 64, 4, 4, 3, group=2, descriptor=descriptor)
    assert not configured(syrk, config, "cpu", torch.bfloat16, ((1, 8), (100, 136)))


@pytest.mark.parametrize("op", CudaOps.OPS)
def test_cuda_as_loops(cuda_ops, op, poisoned):
    check(cuda_ops[op], op)


def test_one_wrong_element_is_named():
    for op in CALLS:
        call = list(calls_of(op, "cpu", FEW))[-1]
        copies = copied(call.arguments)
        returned = getattr(functional, op)(*copies, **call.options)
        assert not problems(call, returned, copies)
        output = call.given(returned, copies)[0]
        place = torch.unravel_index(output.nan_to_num().abs().argmax(), output.shape)
        output[place] = output[place] * 1.01
        assert len(problems(call, returned, copies)) == 1, op
