"""Every op by what runs on a CPU, and by GPU code there: interpreted, or as loops.

Against the specification in float64, on odd sizes with poisoned outputs. tests/gpu/test_ops.py
makes the same calls on GPUs.
"""

import pytest
import torch

from ds_kfac.ops import dispatch, functional
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.triton import MODULES
from tests.close import exact
from tests.ops import specification
from tests.ops.calls import CALLS, NAN, SMALL, Sizes, calls_of, copied, normal, problems, tensors_of
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted_ops

FEW = Sizes((1, 33), (1, 2, 63), (1, 2, 63, 129, 257, 0, 64), ((1, 1), (63, 129)))


@pytest.fixture(scope="module")
def triton_ops():
    with interpreted_ops() as ops:
        yield ops


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


@pytest.mark.parametrize("chunk", [functional.CPU_CHUNK, 1])
@pytest.mark.parametrize("op", dispatch.OPS)
def test_torch(op, chunk, poisoned, monkeypatch):
    monkeypatch.setattr(functional, "CPU_CHUNK", chunk)
    check(getattr(functional, op), op, SMALL)


@pytest.mark.parametrize("op", MODULES)
def test_triton_interpreted(triton_ops, op, poisoned):
    check(triton_ops[op], op)


@pytest.mark.parametrize("op", CudaOps.OPS)
def test_cuda_as_loops(cuda_ops, op, poisoned):
    check(cuda_ops[op], op)


def test_no_layers_are_fine(cuda_ops):
    cuda_ops["symmetric_pack_into_"](torch.zeros(3), [], [])
    assert cuda_ops["symmetric_unpack_from"](torch.zeros(3), [], []) == []
    assert cuda_ops["ema_update_"]([], [], [], [], []).shape == (0,)


@pytest.mark.parametrize("layers", [2, 1])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nothing_is_written_beside_results_that_lie_apart(backend, layers, triton_ops):
    finish = (functional.finish_direction_, triton_ops["finish_direction_"])[backend == "triton"]
    x, used = normal("cpu", 2, 63, 7), torch.ones(2, dtype=torch.bool)
    memory = torch.full((layers, x.numel() // layers + 5), -3.0)
    out = memory[:, 2:-3].unflatten(1, (-1, 7))
    finish(out, x, torch.ones(2), None, torch.ones(2), torch.ones(2), used)
    exact(memory[:, [0, 1, -3, -2, -1]], torch.full((layers, 5), -3.0))
    exact(out.reshape(x.shape), x)


@pytest.mark.parametrize("op", CALLS)
def test_one_wrong_element_is_named(op):
    call = list(calls_of(op, "cpu", FEW))[-1]
    arguments = copied(call.arguments)
    returned = getattr(functional, op)(*arguments, **call.options)
    assert not problems(call, returned, arguments)
    output = next(x for x in tensors_of((returned, arguments)) if x.is_floating_point()).view(-1)
    place = output.nan_to_num(0.0, 0.0, 0.0).abs().argmax()
    for wrong in (output[place] * 1.01, NAN):
        output[place] = wrong
        assert problems(call, returned, arguments)


@pytest.mark.parametrize("op", [functional.syrk_accumulate_, dispatch.syrk_accumulate_])
def test_syrk_is_in_fp32_under_autocast(op):
    x = 1 + torch.rand(50, 9, generator=torch.Generator().manual_seed(0)) / 100
    expected = op(torch.zeros(45), x)
    with torch.autocast("cpu", torch.bfloat16):
        exact(op(torch.zeros(45), x), expected)


@pytest.mark.parametrize("dim", [2, 5, 15])
@pytest.mark.parametrize("blocks", [1, 2])
def test_many_rows_leave_little_of_a_null_direction(dim, blocks):
    """Those of a softmax's gradients, which sum to zero; far below what counts as rounding
    (update/rotation.py)."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(200_000, blocks, dim, generator=generator).softmax(-1)
    x[:, :, 0] -= 1
    numel = functional.packed_numel(dim)
    total = torch.zeros(blocks * numel)
    if blocks == 1:
        functional.syrk_accumulate_(total, x[:, 0])
    else:
        functional.block_syrk_accumulate_(total, x.flatten(1), block=dim)
    for part in total.split(numel):
        values = torch.linalg.eigvalsh(specification.symmetric_unpack(part, dim=dim).double())
        assert abs(values[0]) < 4 * torch.finfo(torch.float32).eps * values[-1]
