"""Every op of every backend against float64, on CPUs at small sizes and on GPUs at real ones
too."""

import pytest
import torch

from tests.ops.calls import REAL, SMALL, Sizes, calls_of
from tests.ops.targets import (
    configured,
    copied,
    deterministic,
    implementations,
    no_waiting,
    pairs,
    poison,
    problems,
    refill,
    side_stream,
)

SHARED = Sizes((515,), (385,), (385, 2, 1), ((385, 385),))
"""Large enough for several threads of a CPU to share."""
EVERY = pytest.mark.parametrize(("device", "backend", "op"), pairs("torch", "triton", "cuda"))


@EVERY
def test_results_are_those_of_float64(device, backend, op, poisoned):
    function, wrong = implementations(backend)[op], []
    for sizes in (SMALL, REAL) if device == "cuda" else (SMALL,):
        for call in calls_of(op, device, sizes):
            wrong += problems(call, function(*call.arguments, **call.options), call.arguments)
    assert not wrong, "\n".join(wrong)


@EVERY
def test_deterministic_mode_gives_the_same_bits_each_time(device, backend, op, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    function = implementations(backend)[op]
    with deterministic():
        for call in (*calls_of(op, device, SMALL), *calls_of(op, device, SHARED)):
            results = []
            for _ in range(3):
                arguments = copied(call.arguments)
                results.append(call.given(function(*arguments, **call.options), arguments))
            for again in results[1:]:
                for x, y in zip(results[0], again, strict=True):
                    assert torch.equal(x.nan_to_num(), y.nan_to_num()), call.label
            assert not problems(call, function(*call.arguments, **call.options), call.arguments)


@EVERY
def test_work_is_queued_on_the_current_stream(device, backend, op):
    """The arguments get their values on a busy stream; on another one the op would see NaN."""
    function = implementations(backend)[op]
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
    function = implementations(backend)[op]
    for call in calls_of(op, device, SMALL):
        function(*copied(call.arguments), **call.options)  # compiled, and cached indices made
        arguments = copied(call.arguments)
        with no_waiting(device):
            returned = function(*arguments, **call.options)
        assert not problems(call, returned, arguments)


@pytest.mark.parametrize(
    ("device", "backend", "op"), [p for p in pairs("torch", "triton", "cuda") if p.marks]
)
def test_a_cuda_graph_replays_it(device, backend, op):
    function = implementations(backend)[op]
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
def test_every_shipped_syrk_configuration_is_right(monkeypatch):
    pytest.importorskip(
        "triton", reason="triton is not installed: its configurations are not tried"
    )
    from benchmarks.kernels.syrk_candidates import CANDIDATES
    from ds_kfac.ops.triton import syrk
    from ds_kfac.ops.triton.syrk import architecture, family

    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        for config in CANDIDATES[family(dtype, architecture())]:
            for variant in dict.fromkeys((config, config.plain())):
                for split in (1, 3):
                    monkeypatch.setattr(syrk, "split_for", lambda *_, split=split: split)
                    wrong += configured(
                        syrk, variant, "cuda", dtype, ((1, 8), (300, 136), (2048, 2304))
                    )
    assert not wrong, "\n".join(wrong)
