"""What a backend has no code for gives torch's result, from every backend; what fails names the way
out."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch

from ds_kfac.ops import check, dispatch, functional
from ds_kfac.ops import triton as backend
from ds_kfac.ops.check import NotMadeFor, guarded
from ds_kfac.ops.cuda import CudaError, CudaOps, load
from ds_kfac.ops.dispatch import Backend
from tests.close import close, exact
from tests.ops import specification
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Implementations of these tests compute nothing: not checked. The process's choice is
    restored."""
    monkeypatch.setenv("DS_KFAC_CHECK_OPS", "0")
    yield
    monkeypatch.undo()
    dispatch.use(None, "cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["cuda", "triton"])
def implementations(request) -> Mapping[str, Callable]:
    """Of a backend, where it runs on a CPU: unguarded, CUDA emulated, Triton interpreted."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
        with interpreted("") as (module,):
            module.unavailable = lambda: None
            yield module.load()
        return
    ops = emulated()
    yield {op: getattr(ops, op) for op in CudaOps.OPS}


def strided(*shape: int) -> torch.Tensor:
    """Neither side is in one piece."""
    return normal(*(2 * size for size in shape))[(slice(None, None, 2),) * len(shape)]


def doubles(count: int) -> list[torch.Tensor]:
    return [normal(6).double() for _ in range(count)]


def adam_given(first: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple:
    """Of two matrices; the counter, too, in the dtype: bias corrections come from it."""
    x, second = (normal(*first.shape, seed=seed).abs().to(dtype) for seed in range(2))
    return (
        torch.zeros_like(x),
        x,
        first.to(dtype),
        second,
        torch.ones(2, dtype=dtype),
        torch.tensor([True, False]),
    )


Call = tupleCall = tuple[tuple, dict]
ONE = [torch.ones(())]
ADAM = {"betas": (0.9, 0.95), "eps": 0.1}
VECTORS = *[torch.ones(2)] * 4, torch.tensor([True, False])
UNUSUAL: dict[str, tuple[str, Callable[[], Call]]] = {
    "rows in fp64": ("syrk_accumulate_", lambda: ((torch.zeros(6), normal(4, 3).double()), {})),
    "a sum with gaps": ("syrk_accumulate_", lambda: ((torch.zeros(12)[::2], normal(4, 3)), {})),
    "matrices in columns": (
        "symmetric_pack_into_",
        lambda: ((torch.zeros(6), [0], [normal(3, 3).T]), {}),
    ),
    "a buffer in fp64": ("symmetric_unpack_from", lambda: ((normal(6).double(), [0], [3]), {})),
    "averages in fp64": (
        "ema_update_",
        lambda: ((doubles(1), doubles(1), ONE, [torch.ones(())], [0.9]), {}),
    ),
    "no elements": ("adam_step_", lambda: (adam_given(normal(2, 0, 3)), ADAM)),
    "moments with gaps": ("adam_step_", lambda: (adam_given(strided(2, 3, 4)), ADAM)),
    "Adam in fp64": ("adam_step_", lambda: (adam_given(normal(2, 3, 4), torch.float64), ADAM)),
    "a result in columns": (
        "finish_direction_",
        lambda: ((strided(2, 4, 3).mT, normal(2, 3, 4), *VECTORS), {}),
    ),
    "a vector in fp64": (
        "finish_direction_",
        lambda: ((*[normal(2, 3, 4)] * 2, VECTORS[0].double(), *VECTORS[1:]), {}),
    ),
}
MADE_FOR = {"triton": set(), "cuda": set()}
"""Unusual calls that a backend has code for."""


def test_what_a_backend_is_not_made_for_is_refused_before_a_write_and_done_by_torch(
    implementations,
):
    name = next(
        name for name in MADE_FOR if name in next(iter(implementations.values())).__module__
    )
    for case in (case for case, (op, _) in UNUSUAL.items() if op in implementations):
        op, call = UNUSUAL[case]
        (arguments, options), (wanted_arguments, _) = call(), call()
        if case not in MADE_FOR[name]:
            with pytest.raises(NotMadeFor):
                implementations[op](*arguments, **options)
            exact(arguments, wanted_arguments, what=case)
        found = guarded(name, op, implementations[op])(*arguments, **options)
        wanted = getattr(specification, op)(*wanted_arguments, **options)
        for parts in ((found, wanted), (arguments, wanted_arguments)):
            close(*map(tensors_of, parts), sums=4, what=case)


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [x for part in value for x in tensors_of(part)] if isinstance(value, (list, tuple)) else []
    )


def failing(problem: Exception) -> Callable:
    def op(*arguments, **options):
        raise problem

    return op


@pytest.mark.parametrize(
    "problem",
    [
        CudaError("pack: cudaErrorNoKernelImageForDevice (209)"),
        OSError("no ptxas"),
        RuntimeError("compile"),
    ],
)
def test_a_kernel_that_fails_names_the_way_out(monkeypatch, problem):
    ops = {"adam_step_": failing(problem)}
    monkeypatch.setattr(
        dispatch, "BACKENDS", {"fake": Backend("cpu", lambda: ops), **dispatch.BACKENDS}
    )
    op = dispatch.use(None, "cpu").ops["adam_step_"][1]
    with pytest.raises(
        RuntimeError,
        match=r'adam_step_ by the backend "fake" failed: (.|\n)*kfac.ops.backend "torch"',
    ) as told:
        op(normal(2, 3))
    assert told.value.__cause__ is problem and str(problem) in str(told.value)


@pytest.mark.parametrize(
    "problem", [ValueError("shapes"), torch.OutOfMemoryError("of memory"), KeyboardInterrupt()]
)
def test_wrong_arguments_and_full_memory_are_no_fault_of_the_backend(problem):
    with pytest.raises(type(problem)) as told:
        guarded("fake", "adam_step_", failing(problem))()
    assert told.value is problem


# why a GPU's backends cannot run


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
        ({"capability": (7, 5)}, "needs compute capability 8.0, Old GPU has 7.5"),
    ):
        pretend(monkeypatch, **options)
        assert check.gpu_problem().startswith(reason)
        with pytest.raises(RuntimeError, match=reason):
            load()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "NVIDIA" in check.gpu_problem()


def test_choices_of_a_gpu_tell_what_is_missing(monkeypatch):
    pretend(monkeypatch, capability=(7, 5))
    choice = dispatch.use(None, "cuda")
    assert {name for name, _ in choice.ops.values()} == {"torch"} and set(choice.missing) == {
        "triton",
        "cuda",
    }
    with pytest.raises(
        ValueError, match=r'kfac.ops.backend "cuda" cannot run here: needs compute capability 8.0'
    ):
        dispatch.use("cuda", "cuda")


def test_no_nvcc_is_a_reason_of_cuda_alone(monkeypatch, tmp_path):
    pretend(monkeypatch, capability=(9, 0))
    monkeypatch.setattr("ds_kfac.ops.build.find_nvcc", lambda: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(backend, "unavailable", lambda: None)
    monkeypatch.setattr(backend, "MODULES", {})
    choice = dispatch.use(None, "cuda")
    assert "no nvcc" in choice.missing["cuda"] and "triton" not in choice.missing


def test_a_gpu_gets_the_best_of_both(monkeypatch):
    monkeypatch.setitem(
        dispatch.BACKENDS, "cuda", Backend("cuda", lambda: dict.fromkeys(CudaOps.OPS, math.hypot))
    )
    ops = dict.fromkeys(backend.MODULES, math.hypot)
    monkeypatch.setitem(dispatch.BACKENDS, "triton", Backend("cuda", lambda: ops))
    chosen = {op: name for op, (name, _) in dispatch.use(None, "cuda").ops.items()}
    assert chosen["syrk_accumulate_"] == chosen["adam_step_"] == "triton"
    assert chosen["ema_update_"] == chosen["symmetric_pack_into_"] == "cuda"
    assert not set(CudaOps.OPS) & set(ops)


def test_a_triton_that_does_not_import_is_a_reason(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setitem(__import__("sys").modules, "ds_kfac.ops.triton.scale", None)
    assert backend.unavailable().startswith("triton is installed but does not import: ")


def test_torch_has_every_op():
    assert all(callable(getattr(functional, op)) for op in dispatch.OPS)
