"""Every op of every backend against float64, on CPUs at small sizes and on GPUs at real ones
too."""

import pytest
import torch

from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.dispatch import BACKENDS, OPS
from ds_kfac.ops.triton import MODULES
from tests.gpu.devices import deterministic, no_waiting, poison, refill, side_stream
from tests.ops.calls import REAL, SMALL, Sizes, calls_of, configured, copied, problems, tensors_of

SHARED = Sizes((515,), (385,), (385, 2, 1, 2), ((385, 385),))
"""Large enough for several threads of a CPU to share."""
OFFERS = {"torch": OPS, "triton": tuple(MODULES), "cuda": CudaOps.OPS}
ON_CPU = [pytest.param("cpu", "torch", op, id=f"cpu-torch-{op}") for op in OPS]
ON_GPU = [
    pytest.param("cuda", backend, op, marks=pytest.mark.gpu, id=f"cuda-{backend}-{op}")
    for backend, ops in OFFERS.items()
    for op in ops
]
EVERY = pytest.mark.parametrize(("device", "backend", "op"), ON_CPU + ON_GPU)


def implementation(backend: str, op: str):
    """Not guarded: a backend must do every call of these tests itself. Skips, with the reason,
    where it cannot run."""
    try:
        return BACKENDS[backend].load()[op]
    except RuntimeError as problem:
        pytest.skip(f"no {backend} ops: {problem}")


@EVERY
def test_results_are_those_of_float64(device, backend, op, poisoned):
    function, wrong = implementation(backend, op), []
    for sizes in (SMALL, REAL) if device == "cuda" else (SMALL,):
        for call in calls_of(op, device, sizes):
            wrong += problems(call, function(*call.arguments, **call.options), call.arguments)
    assert not wrong, "\n".join(wrong)


@EVERY
def test_deterministic_mode_gives_the_same_bits_each_time(device, backend, op, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    function = implementation(backend, op)
    with deterministic():
        for call in (*calls_of(op, device, SMALL), *calls_of(op, device, SHARED)):
            results = []
            for _ in range(3):
                arguments = copied(call.arguments)
                returned = function(*arguments, **call.options)
                results.append(tensors_of((returned, arguments)))
            assert not problems(call, returned, arguments)
            for again in results[1:]:
                for x, y in zip(results[0], again, strict=True):
                    assert torch.equal(x.nan_to_num(), y.nan_to_num()), call.label


@EVERY
def test_work_is_queued_on_the_current_stream(device, backend, op):
    """The arguments get their values on a busy stream; on another one the op would see NaN."""
    function = implementation(backend, op)
    for call in calls_of(op, device, SMALL):
        function(*copied(call.arguments), **call.options)  # compiled before
        arguments = copied(call.arguments)
        poison(arguments)
        with side_stream(device):
            refill(arguments, call.arguments)
            returned = function(*arguments, **call.options)
        assert not problems(call, returned, arguments)


@EVERY
def test_nothing_waits_for_the_device(device, backend, op):
    function = implementation(backend, op)
    for call in calls_of(op, device, SMALL):
        function(*copied(call.arguments), **call.options)  # compiled, and cached indices made
        arguments = copied(call.arguments)
        with no_waiting(device):
            returned = function(*arguments, **call.options)
        assert not problems(call, returned, arguments)


@pytest.mark.parametrize(("device", "backend", "op"), ON_GPU)
def test_a_cuda_graph_replays_it(device, backend, op):
    function = implementation(backend, op)
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
