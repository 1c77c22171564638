"""Which implementation of an op runs, why others do not, and what is said when one fails."""

import math
import sys
from collections.abc import Callable

import pytest
import torch

from ds_kfac.config.keys import parse
from ds_kfac.ops import check, cuda, dispatch
from ds_kfac.ops import triton as triton_backend
from ds_kfac.ops.build import BuildError
from ds_kfac.ops.check import guarded
from ds_kfac.ops.cuda import CudaError, CudaOps
from ds_kfac.ops.dispatch import Backend
from tests.ops.triton_tools import interpreted

OLD = "needs compute capability 8.0, Old GPU has 7.5"


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Implementations of these tests compute nothing: not checked. The process's choice is
    restored."""
    monkeypatch.setenv("DS_KFAC_CHECK_OPS", "0")
    yield
    monkeypatch.undo()
    dispatch.use(None, "cpu")


def failing(problem: BaseException) -> Callable:
    def op(*arguments, **options):
        raise problem

    return op


def offer(monkeypatch, load) -> None:
    """A backend "fake" for the CPU, better than torch."""
    monkeypatch.setattr(dispatch, "BACKENDS", {"fake": Backend("cpu", load), **dispatch.BACKENDS})


def test_null_takes_the_best_per_op_and_what_was_chosen_runs(monkeypatch):
    called = []
    offer(monkeypatch, lambda: {"syrk_accumulate_": lambda *a, **k: called.append(a)})
    choice = dispatch.use(None, "cpu")
    assert {op: name for op, (name, _) in choice.ops.items()} == {
        op: "fake" if op == "syrk_accumulate_" else "torch" for op in dispatch.OPS
    }
    assert not choice.missing
    dispatch.syrk_accumulate_(torch.ones(1), torch.ones(1, 1))
    assert len(called) == 1
    dispatch.use("torch", "cpu")
    assert dispatch.syrk_accumulate_(torch.ones(1), torch.ones(1, 1)).tolist() == [2.0]
    assert len(called) == 1


def test_a_backend_that_cannot_run_is_passed_over_with_its_reason_or_refused_by_name(monkeypatch):
    offer(monkeypatch, failing(BuildError("no compiler in PATH")))
    choice = dispatch.use(None, "cpu")
    assert {name for name, _ in choice.ops.values()} == {"torch"}
    assert "not fake: no compiler in PATH" in str(choice)
    with pytest.raises(ValueError, match='backend "fake" cannot run here: no compiler in PATH'):
        dispatch.use("fake", "cpu")
    with pytest.raises(ValueError, match="it is for cuda, not for meta"):
        dispatch.use("cuda", "meta")
    assert str(dispatch.use(None, "meta")) == f"torch ({', '.join(dispatch.OPS)})"


def test_every_backend_can_be_asked_for_and_no_other():
    for name in dispatch.BACKENDS:
        assert parse({"ops": {"backend": name}}).ops.backend == name
    with pytest.raises(ValueError, match=r"kfac\.ops\.backend"):
        parse({"ops": {"backend": "cuda9"}})


@pytest.mark.parametrize(
    "problem", [CudaError("pack: cudaErrorNoKernelImageForDevice (209)"), OSError("no ptxas")]
)
def test_a_kernel_that_fails_names_the_way_out(monkeypatch, problem):
    offer(monkeypatch, lambda: {"adam_step_": failing(problem)})
    op = dispatch.use(None, "cpu").ops["adam_step_"][1]
    remedy = r'adam_step_ by the backend "fake" failed: (.|\n)*kfac.ops.backend "torch"'
    with pytest.raises(RuntimeError, match=remedy) as raised:
        op(torch.ones(2, 3))
    assert raised.value.__cause__ is problem and str(problem) in str(raised.value)


@pytest.mark.parametrize(
    "problem", [ValueError("shapes"), torch.OutOfMemoryError("of memory"), KeyboardInterrupt()]
)
def test_wrong_arguments_and_full_memory_are_no_fault_of_the_backend(problem):
    with pytest.raises(type(problem)) as raised:
        guarded("fake", "adam_step_", failing(problem))()
    assert raised.value is problem


def pretend(monkeypatch, *, capability: tuple[int, int] | None, cuda: str | None = "13.0") -> None:
    """A machine with such a GPU; None: without any."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")


def test_every_reason_why_a_gpu_is_not_used_is_told(monkeypatch):
    for options, reason in (
        ({"capability": None}, "there is no NVIDIA GPU that torch can use"),
        ({"capability": None, "cuda": None}, "torch is built without CUDA"),
        ({"capability": (7, 5)}, OLD),
    ):
        pretend(monkeypatch, **options)
        with pytest.raises(RuntimeError, match=reason):
            cuda.load()
    choice = dispatch.use(None, "cuda")
    assert {name for name, _ in choice.ops.values()} == {"torch"}
    assert set(choice.missing) == {"triton", "cuda"}
    with pytest.raises(ValueError, match=f'backend "cuda" cannot run here: {OLD}'):
        dispatch.use("cuda", "cuda")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "NVIDIA" in check.gpu_problem()


def test_no_nvcc_is_a_reason_of_cuda_alone(monkeypatch, tmp_path):
    pretend(monkeypatch, capability=(9, 0))
    monkeypatch.setattr("ds_kfac.ops.build.find_nvcc", lambda: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(triton_backend, "unavailable", lambda: None)
    monkeypatch.setattr(triton_backend, "MODULES", {})
    choice = dispatch.use(None, "cuda")
    assert "no nvcc" in choice.missing["cuda"] and "triton" not in choice.missing


def test_a_gpu_gets_the_best_of_both(monkeypatch):
    offered = {"cuda": CudaOps.OPS, "triton": tuple(triton_backend.MODULES)}
    for name, ops in offered.items():
        found = Backend("cuda", lambda ops=ops: dict.fromkeys(ops, math.hypot))
        monkeypatch.setitem(dispatch.BACKENDS, name, found)
    chosen = {op: name for op, (name, _) in dispatch.use(None, "cuda").ops.items()}
    own = {op: name for name, ops in offered.items() for op in ops}
    assert chosen == {op: own.get(op, "torch") for op in dispatch.OPS}
    assert len(own) == len(offered["cuda"]) + len(offered["triton"]), "no op is in both"


def test_a_triton_that_is_missing_or_does_not_import_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert triton_backend.unavailable() == "triton is not installed"
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "ds_kfac.ops.triton.scale", None)
    expected = "triton is installed but does not import: "
    assert triton_backend.unavailable().startswith(expected)


def test_without_a_gpu_only_the_interpreter_runs():
    pytest.importorskip("triton", reason="triton is not installed")
    assert (triton_backend.unavailable() is None) == torch.cuda.is_available()
    with interpreted("") as (backend,):
        assert backend.unavailable() is None
