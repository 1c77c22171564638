"""Every op of every backend against the specification in float64, on odd sizes with poisoned
outputs: on a CPU also GPU code, interpreted or as loops; on a GPU at real sizes, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_kfac.ops import dispatch, functional
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.triton import MODULES
from tests.close import exact
from tests.ops import specification
from tests.ops.calls import (
    REAL,
    SMALL,
    Sizes,
    calls_of,
    configured,
    copied,
    normal,
    problems,
    tensors_of,
)
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted_ops

FEW = Sizes((1, 33), (1, 2, 63), (1, 2, 63, 129, 257, 0, 64), ((1, 1), (63, 129)))
SHARED = Sizes((515,), (385,), (385, 2, 1, 2), ((385, 385),))
"""Large enough for several threads of a CPU to share."""
OFFERS = {"torch": dispatch.OPS, "triton": tuple(MODULES), "cuda": CudaOps.OPS}
FEW_LAYERS, BY_ROWS = "cuda, 3 layers a launch", "torch, row by row"
ON_GPU = [
    pytest.param("cuda", backend, op, marks=pytest.mark.gpu, id=f"gpu-{backend}-{op}")
    for backend, ops in OFFERS.items()
    for op in ops
]
ON_CPU = [
    ("cpu", backend, op)
    for backend, ops in {**OFFERS, FEW_LAYERS: CudaOps.OPS, BY_ROWS: dispatch.OPS}.items()
    for op in ops
]
EVERY = pytest.mark.parametrize(("device", "backend", "op"), ON_CPU + ON_GPU)
NATIVE = [case for case in ON_CPU if case[1] == "torch"] + ON_GPU


@pytest.fixture(scope="module")
def triton_ops():
    with interpreted_ops() as ops:
        yield ops


@pytest.fixture
def function(device, backend, op, request, monkeypatch):
    """Not guarded: a backend must do every call of these tests itself. Skips, with the reason,
    where it cannot run."""
    if device == "cuda":
        try:
            return dispatch.BACKENDS[backend].load()[op]
        except RuntimeError as problem:
            pytest.skip(f"no {backend} ops: {problem}")
    if backend == "triton":
        return request.getfixturevalue("triton_ops")[op]
    if backend.startswith("cuda"):
        return getattr(emulated(3 if backend == FEW_LAYERS else 512), op)
    if backend == BY_ROWS:
        monkeypatch.setattr(functional, "CPU_CHUNK", 1)
    return getattr(functional, op)


def poison(value: Any) -> None:
    """NaN, or -1 for integers, in every tensor of a structure."""
    for x in tensors_of(value):
        x.fill_(float("nan") if x.is_floating_point() else -1)


def refill(value: Any, source: Any) -> None:
    """Copies the tensors of a structure into those of another that is shaped alike."""
    for x, y in zip(tensors_of(value), tensors_of(source), strict=True):
        x.copy_(y)


class _NoReads(TorchDispatchMode):
    """On a CPU: raises where a GPU would have to wait for a value."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.READS:
            raise RuntimeError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Host synchronisations raise."""
    if device != "cuda":
        with _NoReads():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@contextmanager
def side_stream(device: str) -> Iterator[None]:
    """Another stream than the default one, busy for some milliseconds; on a CPU nothing."""
    if device != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        yield
    stream.synchronize()


@EVERY
def test_results_are_those_of_float64(device, backend, op, function, poisoned):
    sizes = (SMALL,) if backend.startswith("torch") else (FEW,)
    wrong = []
    for size in (SMALL, REAL) if device == "cuda" else sizes:
        for call in calls_of(op, device, size):
            arguments = copied(call.arguments)
            wrong += problems(call, function(*arguments, **call.options), arguments)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("device", "backend", "op"), NATIVE)
def test_deterministic_mode_gives_the_same_bits_each_time(device, op, function, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = (SMALL, SHARED) if device == "cuda" else (SHARED,)
    with deterministic():
        for call in (call for size in sizes for call in calls_of(op, device, size)):
            results = []
            for _ in range(2):
                arguments = copied(call.arguments)
                returned = function(*arguments, **call.options)
                results.append(tensors_of((returned, arguments)))
            assert not problems(call, returned, arguments)
            for x, y in zip(*results, strict=True):
                assert torch.equal(x.nan_to_num(), y.nan_to_num()), call.label


@pytest.mark.parametrize(("device", "backend", "op"), NATIVE)
def test_work_is_queued_on_the_current_stream_and_nothing_waits_for_it(device, op, function):
    """The arguments get their values on a busy stream; on another one the op would see NaN."""
    for call in calls_of(op, device, SMALL):
        function(*copied(call.arguments), **call.options)  # compiled, and cached indices made
        arguments = copied(call.arguments)
        poison(arguments)
        with side_stream(device), no_waiting(device):
            refill(arguments, call.arguments)
            returned = function(*arguments, **call.options)
        assert not problems(call, returned, arguments)


@pytest.mark.parametrize(("device", "backend", "op"), ON_GPU)
def test_a_cuda_graph_replays_it(device, op, function):
    for call in calls_of(op, device, SMALL):
        arguments = copied(call.arguments)
        with side_stream(device):
            function(*arguments, **call.options)  # compiled, and cached indices made
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = function(*arguments, **call.options)
        for _ in range(2):
            refill(arguments, call.arguments)
            graph.replay()
            torch.cuda.synchronize()
            assert not problems(call, returned, arguments), call.label


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_shipped_syrk_configuration_is_right(dtype, split, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks.kernels.syrk_candidates import CANDIDATES
    from ds_kfac.ops.triton import syrk

    monkeypatch.setattr(syrk, "split_for", lambda *_: split)
    shapes, wrong = ((1, 8), (300, 136), (2048, 2304)), []
    for config in CANDIDATES[syrk.family(dtype, syrk.architecture())]:
        for variant in dict.fromkeys((config, config.plain())):
            wrong += configured(syrk, variant, "cuda", dtype, shapes)
    assert not wrong, "\n".join(wrong)


def test_no_layers_are_fine():
    ops = emulated()
    ops.symmetric_pack_into_(torch.zeros(3), [], [])
    assert ops.symmetric_unpack_from(torch.zeros(3), [], []) == []
    assert ops.ema_update_([], [], [], [], []).shape == (0,)


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
