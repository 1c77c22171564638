"""A compiled op is compared with the specification before it is used; a faulty one is replaced by
torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_kfac.ops import check, dispatch, functional
from ds_kfac.ops.check import NotMadeFor
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.dispatch import Backend
from ds_kfac.ops.triton import MODULES
from tests.ops.calls import tensors_of
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted_ops

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def notes(monkeypatch, tmp_path):
    """An empty build folder; the process's choice as it was."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("DS_KFAC_CHECK_OPS", raising=False)
    yield lambda: [json.loads(path.read_text()) for path in tmp_path.glob("ds_kfac/checked-*.json")]
    monkeypatch.undo()
    dispatch.use(None, "cpu")


def offer(monkeypatch, **ops) -> None:
    monkeypatch.setattr(
        dispatch, "BACKENDS", {"fake": Backend("cpu", lambda: ops), **dispatch.BACKENDS}
    )


def off_by_one(op: str, output: int):
    """torch's, with one element of one result (returned, or written to an argument) wrong by a
    thousandth."""

    def run(*arguments, **options):
        found = getattr(functional, op)(*arguments, **options)
        x = [x for x in tensors_of((found, arguments)) if x.is_floating_point()][output]
        x.view(-1)[x.abs().argmax()] *= 1.01
        return found

    return run


def test_every_op_that_a_backend_compiles_is_checked():
    assert set(check.PROBED) == {*MODULES, *CudaOps.OPS}


@pytest.mark.parametrize("op", check.PROBED)
def test_a_right_op_has_no_fault_and_a_slightly_wrong_one_has(op):
    assert check.fault(op, getattr(functional, op), CPU) == ""
    assert check.fault(op, off_by_one(op, 0), CPU).startswith("is wrong: off by ")


def test_our_kernels_have_no_fault(monkeypatch):
    monkeypatch.setattr(check, "SIDES", ((65, 63), (33, 96)))
    ops = {op: getattr(emulated(), op) for op in CudaOps.OPS}
    with interpreted_ops() as of_triton:
        for op, run in (ops | of_triton).items():
            assert check.fault(op, run, CPU) == "", op


def test_faulty_ops_are_torch_s_and_the_others_stay(monkeypatch, notes):
    def crashes(*arguments, **options):
        raise OSError("no kernel image")

    def returns_nothing(*arguments, **options):
        return None

    offer(
        monkeypatch,
        adam_step_=off_by_one("adam_step_", 2),
        ema_update_=crashes,
        symmetric_unpack_from=returns_nothing,
        finish_direction_=functional.finish_direction_,
    )
    choice = dispatch.use(None, "cpu")
    by = {op: name for op, (name, _) in choice.ops.items()}
    assert by == {op: "fake" if op == "finish_direction_" else "torch" for op in dispatch.OPS}
    assert set(choice.replaced) == {"adam_step_", "ema_update_", "symmetric_unpack_from"}
    wrong = "adam_step_ by fake is wrong: off by 1.0e-02 of the largest value, in float32"
    assert wrong in choice.replaced["adam_step_"]
    assert "ema_update_ by fake fails: ema_update_ by the backend" in choice.replaced["ema_update_"]
    assert "not adam_step_: adam_step_ by fake is wrong" in str(choice)
    assert set(notes()[0]) == {f"{op} by fake" for op in (*choice.replaced, "finish_direction_")}


def test_a_dtype_that_an_op_is_not_made_for_is_torch_s_and_no_fault():
    def fp32_only(sum_P, x_ND, **options):
        if x_ND.dtype != torch.float32:
            raise NotMadeFor("fp32")
        return functional.syrk_accumulate_(sum_P, x_ND, **options)

    guarded = dispatch.guarded("fake", "syrk_accumulate_", fp32_only)
    assert check.fault("syrk_accumulate_", guarded, CPU) == ""


def test_what_was_found_is_noted_and_not_found_again(monkeypatch, notes):
    called = []

    def counted(*arguments, **options):
        called.append(1)
        return functional.adam_step_(*arguments, **options)

    offer(monkeypatch, adam_step_=counted)
    for _ in range(2):
        assert dispatch.use(None, "cpu").ops["adam_step_"][0] == "fake"
    assert len(called) == len(check.SIDES) and notes() == [{"adam_step_ by fake": ""}]
    monkeypatch.setattr(check, "identity", lambda device: "another driver")
    dispatch.use(None, "cpu")
    assert len(called) == 2 * len(check.SIDES)


def test_a_kernel_that_breaks_the_context_ends_the_attach_and_is_noted_alone(monkeypatch, notes):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    offer(
        monkeypatch,
        finish_direction_=functional.finish_direction_,
        adam_step_=off_by_one("adam_step_", 0),
    )
    with monkeypatch.context() as patch:
        patch.setattr(check, "check_alive", lost)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            dispatch.use(None, "cpu")
    assert [op for op, why in notes()[0].items() if why] == ["adam_step_ by fake"]
    assert list(dispatch.use(None, "cpu").replaced) == ["adam_step_"]


def test_memory_that_is_full_is_no_fault_and_not_noted(monkeypatch, notes):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("full")

    offer(monkeypatch, adam_step_=full)
    with pytest.raises(torch.OutOfMemoryError):
        dispatch.use(None, "cpu")
    assert notes() == [{}]


def test_an_op_that_ends_its_process_is_not_tried_by_the_next(monkeypatch, tmp_path):
    program = (
        "import os, sys; sys.modules['deepspeed'] = None; import benchmarks.kernels\n"
        "from ds_kfac.ops import dispatch\n"
        "ops = {'adam_step_': lambda *a, **k: os._exit(7)}\n"
        "dispatch.BACKENDS = {'fake': dispatch.Backend('cpu', lambda: ops), **dispatch.BACKENDS}\n"
        "print(dispatch.use(None, 'cpu').replaced['adam_step_'])"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.returncode == 7, first.stderr
    assert f"adam_step_ by fake {check.ENDED} (noted in {tmp_path}" in second.stdout, second.stderr


def test_the_check_can_be_switched_off_and_does_without_a_folder(monkeypatch, tmp_path):
    offer(monkeypatch, adam_step_=off_by_one("adam_step_", 0))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "adam_step_" in dispatch.use(None, "cpu").replaced
    monkeypatch.setenv("DS_KFAC_CHECK_OPS", "0")
    assert dispatch.use(None, "cpu").ops["adam_step_"][0] == "fake"
