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
SIX, ROWS, FOUR, FIVE = (torch.zeros(shape) for shape in (6, (4, 3), (4, 4), (4, 5)))
ONE, VECTOR, FLAG = torch.ones(()), torch.zeros(1), torch.tensor([True])
MATRIX, HIGHER, TWO = torch.zeros(1, 2, 2), torch.zeros(1, 3, 2), torch.zeros(2)
ADAM = {"betas": (0.9, 0.95), "eps": 0.1}


def wrong_calls():
    """What is wrong -> op, arguments, options, and what the message has to say."""
    few, column = (torch.ones(shape, dtype=torch.bool) for shape in (3, (4, 1)))
    syrk, blocks, ema = "syrk_accumulate_", "block_syrk_accumulate_", "ema_update_"
    kept, unfit = r"kept must be bool of shape \(4,\), one for each row, got ", "do not fit, got "
    flags = FLAG.repeat(2)
    return {
        "a sum without the bias": (syrk, (SIX, ROWS), {"bias": True}, r"\(10,\) .* a bias, got"),
        "few flags": (syrk, (SIX, ROWS), {"kept": few}, kept + r"torch.bool \(3,\)"),
        "numbers as flags": (syrk, (SIX, ROWS), {"kept": torch.ones(4)}, kept + "torch.float32"),
        "a column of flags": (blocks, (SIX, FOUR), {"block": 2, "kept": column}, kept),
        "half a block": (blocks, (SIX, FIVE), {"block": 2}, "rows of 5 in blocks of 2"),
        "not square": ("symmetric_pack_into_", (SIX, [0], [ROWS[:2]]), {}, r"square .*\(2, 3\)"),
        "beyond the end": ("symmetric_unpack_from", (SIX, [1], [3]), {}, "3 at 1 is outside of 6"),
        "before the start": ("symmetric_unpack_from", (SIX, [-1], [3]), {}, "3 at -1 is outside"),
        "a shorter sum": (ema, ([SIX], [FIVE[0]], [ONE], [ONE], [0.9]), {}, r"\[6\] .* \[5\]"),
        "two counts": (ema, ([SIX], [SIX], [TWO], [ONE], [0.9]), {}, r"scalars, got .* \(2,\)"),
        "higher moments": ("adam_step_", (*[MATRIX] * 3, HIGHER, VECTOR, FLAG), ADAM, unfit),
        "two flags": ("adam_step_", (*[MATRIX] * 4, VECTOR, flags), ADAM, unfit),
        "two sizes": ("finish_direction_", (*[MATRIX] * 2, *[VECTOR, TWO] * 2, FLAG), {}, unfit),
        "a higher result": (
            "finish_direction_",
            (HIGHER, MATRIX, VECTOR, None, VECTOR, VECTOR, FLAG),
            {},
            r"the result does not fit, got torch.float32 \(1, 3, 2\)",
        ),
    }


def test_wrong_arguments_are_named(ops):
    for case, (op, arguments, options, message) in wrong_calls().items():
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


def averages(sums: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> tuple:
    """Of one factor."""
    ones = [torch.ones(())]
    return [normal(6).to(dtype)], sums, ones, [torch.ones(())], [0.9]


def finish_given(out: torch.Tensor, x: torch.Tensor, norm: torch.Tensor) -> tuple:
    """Of two matrices."""
    return out, x, norm, *[torch.ones(2)] * 3, torch.tensor([True, False])


TENSORS = {"betas": (torch.tensor(0.9), 0.95), "eps": 0.1}
UNUSUAL: dict[str, tuple[str, Callable[[], tuple], dict]] = {
    "rows in fp64": ("syrk_accumulate_", lambda: (torch.zeros(6), normal(4, 3).double()), {}),
    "a sum with gaps": ("syrk_accumulate_", lambda: (torch.zeros(12)[::2], normal(4, 3)), {}),
    "in columns": ("symmetric_pack_into_", lambda: (torch.zeros(6), [0], [normal(3, 3).T]), {}),
    "to fp64": ("symmetric_pack_into_", lambda: (doubles(1)[0], [0], [normal(3, 3)]), {}),
    "from fp64": ("symmetric_unpack_from", lambda: (doubles(1)[0], [0], [3]), {}),
    "averages in fp64": ("ema_update_", lambda: averages(doubles(1), torch.float64), {}),
    "sums with gaps": ("ema_update_", lambda: averages([normal(12)[::2]]), {}),
    "no elements": ("adam_step_", lambda: adam_given(normal(2, 0, 3)), ADAM),
    "moments with gaps": ("adam_step_", lambda: adam_given(strided(2, 3, 4)), ADAM),
    "Adam in fp64": ("adam_step_", lambda: adam_given(normal(2, 3, 4), torch.float64), ADAM),
    "betas in memory": ("adam_step_", lambda: adam_given(normal(2, 3, 4)), TENSORS),
    "a result in columns": (
        "finish_direction_",
        lambda: finish_given(strided(2, 4, 3).mT, normal(2, 3, 4), torch.ones(2)),
        {},
    ),
    "a norm in fp64": (
        "finish_direction_",
        lambda: finish_given(normal(2, 3, 4), normal(2, 3, 4), torch.ones(2).double()),
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
        CudaOps(emulated()._library).symmetric_pack_into_(torch.zeros(6), [0], [torch.zeros(3, 3)])
