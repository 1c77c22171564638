"""Which implementation of an op runs, why others do not, and what is said when one fails. A
compiled op is compared with torch before it is used; a faulty one is replaced."""

import json
import os
import sys
from collections.abc import Callable

import pytest
import torch

from ds_kfac.ops import check, cuda, dispatch, functional
from ds_kfac.ops import triton as triton_backend
from ds_kfac.ops.build import BuildError
from ds_kfac.ops.check import guarded
from ds_kfac.ops.cuda import CudaError, CudaOps
from ds_kfac.ops.dispatch import Backend
from ds_kfac.ops.triton import MODULES
from tests.ops.calls import spoiled
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted_ops

CPU = torch.device("cpu")
OLD = "needs compute capability 8.0, Old GPU has 7.5"


@pytest.fixture(autouse=True)
def notes(monkeypatch, tmp_path):
    """What was noted of checks in an empty build folder. The process's choice is restored."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("DS_KFAC_CHECK_OPS", raising=False)
    yield lambda: [json.loads(path.read_text()) for path in tmp_path.glob("ds_kfac/checked-*.json")]
    monkeypatch.undo()
    dispatch.use(None, "cpu")


@pytest.fixture
def unchecked(monkeypatch):
    """For implementations that compute nothing."""
    monkeypatch.setenv("DS_KFAC_CHECK_OPS", "0")


def failing(problem: BaseException) -> Callable:
    def op(*arguments, **options):
        raise problem

    return op


def offer(monkeypatch, load=None, **ops) -> None:
    """A backend "fake" for the CPU, better than torch."""
    fake = Backend("cpu", load or (lambda: ops))
    monkeypatch.setattr(dispatch, "BACKENDS", {"fake": fake, **dispatch.BACKENDS})


def used(device: str = "cpu") -> dict[str, str]:
    """Op -> the backend that is chosen for it."""
    return {op: name for op, (name, _) in dispatch.use(None, device).ops.items()}


# which one runs


def test_null_takes_the_best_per_op_and_what_was_chosen_runs(monkeypatch, unchecked):
    called = []
    offer(monkeypatch, syrk_accumulate_=lambda *a, **k: called.append(a))
    expected = dict.fromkeys(dispatch.OPS, "torch") | {"syrk_accumulate_": "fake"}
    assert used() == expected and not dispatch.use(None, "cpu").missing
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
    with pytest.raises(ValueError, match="is for cuda, not for meta"):
        dispatch.use("cuda", "meta")
    assert str(dispatch.use(None, "meta")) == f"torch ({', '.join(dispatch.OPS)})"


@pytest.mark.parametrize(
    "problem",
    [
        CudaError("pack: cudaErrorNoKernelImageForDevice (209)"),
        ValueError("shapes"),
        torch.OutOfMemoryError("of memory"),
        KeyboardInterrupt(),
    ],
)
def test_a_kernel_that_fails_names_the_way_out(problem):
    """Wrong arguments and full memory are no fault of the backend."""
    remedy = r'adam_step_ by the backend "fake" failed: (.|\n)*kfac.ops.backend "torch"'
    is_fault = isinstance(problem, CudaError)
    with pytest.raises(BaseException, match=remedy if is_fault else str(problem) or None) as raised:
        guarded("fake", "adam_step_", failing(problem))(torch.ones(2, 3))
    assert (raised.value.__cause__ if is_fault else raised.value) is problem


# GPUs


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


def test_a_triton_that_is_missing_or_does_not_import_or_has_no_gpu_is_a_reason(monkeypatch):
    assert (triton_backend.unavailable() is None) == torch.cuda.is_available()
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert triton_backend.unavailable() == "triton is not installed"
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "ds_kfac.ops.triton.scale", None)
    expected = "triton is installed but cannot be imported: "
    assert triton_backend.unavailable().startswith(expected)


# the check


def test_every_op_that_a_backend_compiles_is_checked():
    assert set(check.PROBED) == {*MODULES, *CudaOps.OPS}


@pytest.mark.parametrize("op", check.PROBED)
def test_a_right_op_has_no_fault_and_a_slightly_wrong_one_has(op):
    assert check.fault(op, getattr(functional, op), CPU) == ""
    assert check.fault(op, spoiled(op), CPU).startswith("is wrong: off by ")


def test_our_kernels_have_no_fault(monkeypatch):
    monkeypatch.setattr(check, "SIDES", ((65, 63), (33, 96)))
    ops = {op: getattr(emulated(), op) for op in CudaOps.OPS}
    with interpreted_ops() as of_triton:
        for op, run in (ops | of_triton).items():
            assert check.fault(op, run, CPU) == "", op


def test_faulty_ops_are_torch_s_and_the_others_stay(monkeypatch, notes):
    faulty = {
        "adam_step_": spoiled("adam_step_", output=2),
        "ema_update_": failing(OSError("no kernel image")),
        "symmetric_unpack_from": lambda *arguments, **options: None,
    }
    offer(monkeypatch, **faulty, finish_direction_=functional.finish_direction_)
    assert used() == dict.fromkeys(dispatch.OPS, "torch") | {"finish_direction_": "fake"}
    choice = dispatch.use(None, "cpu")
    assert choice.replaced.keys() == faulty.keys()
    wrong = "adam_step_ by fake is wrong: off by 1.0e-02 of the largest value, in float32"
    assert wrong in choice.replaced["adam_step_"]
    assert "ema_update_ by fake fails: ema_update_ by the backend" in choice.replaced["ema_update_"]
    assert "not adam_step_: adam_step_ by fake is wrong" in str(choice)
    assert set(notes()[0]) == {f"{op} by fake" for op in (*faulty, "finish_direction_")}


def test_what_was_found_is_noted_and_not_found_again(monkeypatch, notes):
    called = []

    def counted(*arguments, **options):
        called.append(1)
        return functional.adam_step_(*arguments, **options)

    offer(monkeypatch, adam_step_=counted)
    assert used() == used() and used()["adam_step_"] == "fake"
    assert len(called) == len(check.SIDES) and notes() == [{"adam_step_ by fake": ""}]
    monkeypatch.setattr(check, "identity", lambda device: "another driver")
    dispatch.use(None, "cpu")
    assert len(called) == 2 * len(check.SIDES)


def test_a_kernel_that_breaks_the_context_ends_the_attach_and_is_noted_alone(monkeypatch, notes):
    lost = failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    right = functional.finish_direction_
    offer(monkeypatch, finish_direction_=right, adam_step_=spoiled("adam_step_"))
    with monkeypatch.context() as patch:
        patch.setattr(check, "check_alive", lost)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            dispatch.use(None, "cpu")
    assert [op for op, why in notes()[0].items() if why] == ["adam_step_ by fake"]
    assert list(dispatch.use(None, "cpu").replaced) == ["adam_step_"]


def test_memory_that_is_full_is_no_fault_and_not_noted(monkeypatch, notes):
    offer(monkeypatch, adam_step_=failing(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        dispatch.use(None, "cpu")
    assert notes() == [{}]


def test_an_op_that_ends_its_process_is_not_tried_by_the_next(monkeypatch, tmp_path):
    offer(monkeypatch, adam_step_=lambda *arguments, **options: os._exit(7))
    child = os.fork()
    if not child:
        dispatch.use(None, "cpu")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    why = dispatch.use(None, "cpu").replaced["adam_step_"]
    assert f"adam_step_ by fake {check.ENDED} (noted in {tmp_path}" in why


def test_the_check_can_be_switched_off_and_does_without_a_folder(monkeypatch, tmp_path):
    offer(monkeypatch, adam_step_=spoiled("adam_step_"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "adam_step_" in dispatch.use(None, "cpu").replaced
    monkeypatch.setenv("DS_KFAC_CHECK_OPS", "0")
    assert used()["adam_step_"] == "fake"
