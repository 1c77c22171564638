"""Wrong arguments are named. What a backend has no code for is refused before it writes, and torch
does it."""

from collections.abc import Callable, Mapping

import pytest
import torch

from ds_kfac.ops import functional
from ds_kfac.ops.check import NotMadeFor, guarded
from ds_kfac.ops.cuda import CudaOps
from tests.close import close, exact
from tests.ops import specification
from tests.ops.calls import normal as normal_on
from tests.ops.calls import tensors_of
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted_ops


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal_on("cpu", *shape, seed=seed)


@pytest.fixture(params=["torch", "cuda", "triton"], scope="module")
def ops(request) -> Mapping[str, Callable]:
    """Of a backend, where it runs on a CPU: unguarded, CUDA emulated, Triton interpreted."""
    if request.param == "torch":
        yield {op: getattr(functional, op) for op in (*TORCH_CHECKS, "block_syrk_accumulate_")}
    elif request.param == "triton":
        with interpreted_ops() as found:
            yield found
    else:
        yield {op: getattr(emulated(), op) for op in CudaOps.OPS}


TORCH_CHECKS = ("syrk_accumulate_", "symmetric_pack_into_")
"""Ops of which torch, too, refuses what the others refuse."""
SIX, TWELVE, ROWS, SQUARE = torch.zeros(6), torch.zeros(12), torch.zeros(4, 3), torch.zeros(3, 3)
ONE, FLAG, MATRIX = torch.ones(()), torch.tensor([True]), torch.zeros(1, 2, 2)
VECTOR, HIGHER = torch.zeros(1), torch.zeros(1, 3, 2)
ADAM = {"betas": (0.9, 0.95), "eps": 0.1}
WRONG: dict[str, tuple[str, tuple, dict, str]] = {
    "a sum without the bias": (
        "syrk_accumulate_",
        (SIX, ROWS),
        {"bias": True},
        r"of shape \(10,\) for rows of 3 and a bias, got torch.float32 \(6,\)",
    ),
    "too few flags of rows": (
        "syrk_accumulate_",
        (SIX, ROWS),
        {"kept": torch.ones(3, dtype=torch.bool)},
        r"kept must be bool of shape \(4,\), one for each row, got torch.bool \(3,\)",
    ),
    "flags that are numbers": (
        "syrk_accumulate_",
        (SIX, ROWS),
        {"kept": torch.ones(4)},
        r"kept must be bool of shape \(4,\), one for each row, got torch.float32 \(4,\)",
    ),
    "flags in a column": (
        "block_syrk_accumulate_",
        (SIX, torch.zeros(4, 4)),
        {"block": 2, "kept": torch.ones(4, 1, dtype=torch.bool)},
        r"block_syrk_accumulate_: kept must be bool of shape \(4,\)",
    ),
    "half a block": (
        "block_syrk_accumulate_",
        (torch.zeros(9), torch.zeros(4, 5)),
        {"block": 2},
        "rows of 5 in blocks of 2",
    ),
    "not square": (
        "symmetric_pack_into_",
        (torch.zeros(3), [0], [torch.zeros(2, 3)]),
        {},
        r"square matri.*, got .*\(2, 3\)",
    ),
    "beyond the end": (
        "symmetric_unpack_from",
        (SIX, [1], [3]),
        {},
        "a triangle of side 3 at 1 is outside of 6 elements",
    ),
    "before the start": (
        "symmetric_unpack_from",
        (SIX, [-1], [3]),
        {},
        "a triangle of side 3 at -1 is outside",
    ),
    "a shorter sum": (
        "ema_update_",
        ([SIX], [torch.zeros(5)], [ONE], [ONE], [0.9]),
        {},
        r"averages of \[6\] elements, sums of \[5\]",
    ),
    "two counts": (
        "ema_update_",
        ([SIX], [SIX], [torch.zeros(2)], [ONE], [0.9]),
        {},
        r"scalars, got torch.float32 \(2,\)",
    ),
    "higher moments": (
        "adam_step_",
        (MATRIX, MATRIX, HIGHER, MATRIX, VECTOR, FLAG),
        ADAM,
        r"adam_step_: .* do not fit, got torch.float32 \(1, 2, 2\)",
    ),
    "two flags": (
        "adam_step_",
        (MATRIX, MATRIX, MATRIX, MATRIX, VECTOR, FLAG.repeat(2)),
        ADAM,
        r"adam_step_: .* do not fit, got .* torch.bool \(2,\)",
    ),
    "two sizes": (
        "finish_direction_",
        (MATRIX, MATRIX, VECTOR, torch.zeros(2), VECTOR, VECTOR, FLAG),
        {},
        r"finish_direction_: .* do not fit, got .* torch.float32 \(2,\)",
    ),
    "a higher result": (
        "finish_direction_",
        (HIGHER, MATRIX, VECTOR, None, VECTOR, VECTOR, FLAG),
        {},
        r"the result does not fit, got torch.float32 \(1, 3, 2\)",
    ),
}


def test_wrong_arguments_are_named(ops):
    for case, (op, arguments, options, message) in WRONG.items():
        if op in ops:
            with pytest.raises(ValueError, match=message) as raised:
                ops[op](*arguments, **options)
            assert not isinstance(raised.value, NotMadeFor), case


def strided(*shape: int) -> torch.Tensor:
    """Neither side is in one piece."""
    return normal(*(2 * size for size in shape))[(slice(None, None, 2),) * len(shape)]


def doubles(count: int) -> list[torch.Tensor]:
    return [normal(6).double() for _ in range(count)]


def adam_given(first: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple:
    """Of two matrices; the counter, too, in the dtype: bias corrections come from it."""
    x, second = (normal(*first.shape, seed=seed).abs().to(dtype) for seed in range(2))
    counts, flags = torch.ones(2, dtype=dtype), torch.tensor([True, False])
    return torch.zeros_like(x), x, first.to(dtype), second, counts, flags


VECTORS = *[torch.ones(2)] * 4, torch.tensor([True, False])
Arguments = tuple
UNUSUAL: dict[str, tuple[str, Callable[[], Arguments], dict]] = {
    "rows in fp64": ("syrk_accumulate_", lambda: (torch.zeros(6), normal(4, 3).double()), {}),
    "a sum with gaps": ("syrk_accumulate_", lambda: (torch.zeros(12)[::2], normal(4, 3)), {}),
    "in columns": ("symmetric_pack_into_", lambda: (torch.zeros(6), [0], [normal(3, 3).T]), {}),
    "to fp64": ("symmetric_pack_into_", lambda: (doubles(1)[0], [0], [normal(3, 3)]), {}),
    "from fp64": ("symmetric_unpack_from", lambda: (doubles(1)[0], [0], [3]), {}),
    "averages in fp64": (
        "ema_update_",
        lambda: (doubles(1), doubles(1), [torch.ones(())], [torch.ones(())], [0.9]),
        {},
    ),
    "a sum with gaps, averaged": (
        "ema_update_",
        lambda: ([normal(6)], [normal(12)[::2]], [torch.ones(())], [torch.ones(())], [0.9]),
        {},
    ),
    "no elements": ("adam_step_", lambda: adam_given(normal(2, 0, 3)), ADAM),
    "moments with gaps": ("adam_step_", lambda: adam_given(strided(2, 3, 4)), ADAM),
    "Adam in fp64": ("adam_step_", lambda: adam_given(normal(2, 3, 4), torch.float64), ADAM),
    "betas in memory": (
        "adam_step_",
        lambda: adam_given(normal(2, 3, 4)),
        {"betas": (torch.tensor(0.9), 0.95), "eps": 0.1},
    ),
    "a result in columns": (
        "finish_direction_",
        lambda: (strided(2, 4, 3).mT, normal(2, 3, 4), *VECTORS),
        {},
    ),
    "a vector in fp64": (
        "finish_direction_",
        lambda: (*[normal(2, 3, 4)] * 2, VECTORS[0].double(), *VECTORS[1:]),
        {},
    ),
}


def test_what_a_backend_is_not_made_for_is_refused_before_a_write_and_done_by_torch(ops):
    if "block_syrk_accumulate_" in ops:
        pytest.skip("torch is made for everything")
    for case, (op, given, options) in UNUSUAL.items():
        if op not in ops:
            continue
        arguments, expected = given(), given()
        with pytest.raises(NotMadeFor):
            ops[op](*arguments, **options)
        exact(arguments, expected, what=case)
        returned = guarded("a backend", op, ops[op])(*arguments, **options)
        wanted = getattr(specification, op)(*expected, **options)
        close(tensors_of((returned, arguments)), tensors_of((wanted, expected)), sums=4, what=case)


def test_a_cuda_op_refuses_tensors_of_another_device():
    with pytest.raises(NotMadeFor, match=r"one cuda device, got \['cpu'\]"):
        CudaOps(emulated()._library).symmetric_pack_into_(torch.zeros(6), [0], [SQUARE])
