"""Every op by its specification and by what runs on a CPU, and by GPU code there: interpreted, or
as loops.

Against float64, on odd sizes with poisoned outputs. tests/gpu/test_ops.py makes the same calls on
GPUs.
"""

import sys
from importlib.util import find_spec

import pytest
import torch

from ds_kfac.ops import dispatch, functional
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.triton import MODULES
from tests.ops import specification
from tests.ops.calls import CALLS, SMALL, Sizes, calls_of
from tests.ops.cuda_emulation import emulated
from tests.ops.targets import configured, copied, problems
from tests.ops.triton_tools import interpreted

FEW = Sizes((1, 33), (1, 2, 63), (1, 2, 63, 129, 257, 0, 64), ((1, 1), (63, 129)))


@pytest.fixture(scope="module")
def triton_ops():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: its kernels are not tested")
    files = sorted(set(MODULES.values()))
    with interpreted(*files) as modules:
        by_file = dict(zip(files, modules, strict=True))
        yield {op: getattr(by_file[file], op) for op, file in MODULES.items()}


@pytest.fixture(scope="module", params=[3, 512], ids=["3 layers a launch", "512 layers a launch"])
def cuda_ops(request):
    ops = emulated(request.param)
    return {op: getattr(ops, op) for op in CudaOps.OPS}


def check(function, op: str, sizes: Sizes = FEW) -> None:
    wrong = []
    for call in calls_of(op, "cpu", sizes):
        arguments = copied(call.arguments)
        wrong += problems(call, function(*arguments, **call.options), arguments)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", dispatch.OPS)
@pytest.mark.parametrize("ops", [specification, functional], ids=["specification", "functional"])
def test_torch(ops, op, poisoned):
    check(getattr(ops, op), op, SMALL)


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
        place = torch.unravel_index(output.nan_to_num(0.0, 0.0, 0.0).abs().argmax(), output.shape)
        output[place] = output[place] * 1.01
        assert len(problems(call, returned, copies)) == 1, op
