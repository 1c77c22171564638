"""Wrong arguments are named. What a backend has no code for is refused before it writes, and torch
does it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_kfac.ops import functional
from ds_kfac.ops.check import NotMadeFor, guarded
from ds_kfac.ops.cuda import CudaOps
from tests.ops.calls import Call, Sizes, calls_of, copied, problems, tensors_of
from tests.ops.cuda_emulation import emulated
from tests.ops.triton_tools import interpreted_ops

FEW = Sizes((5,), (3,), (3, 9, 1, 4), ((2, 3),))


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
        "beyond the end": ("symmetric_unpack_from", (SIX, [1], [3]), {}, "3 .* 1 does not fit"),
        "before the start": ("symmetric_unpack_from", (SIX, [-1], [3]), {}, "3 .* -1 does not fit"),
        "a shorter sum": (ema, ([SIX], [FIVE[0]], [ONE], [ONE], [0.9]), {}, r"\[6\] .* \[5\]"),
        "two counts": (ema, ([SIX], [SIX], [TWO], [ONE], [0.9]), {}, r"one element .* \(2,\)"),
        "higher moments": ("adam_step_", (*[MATRIX] * 3, HIGHER, VECTOR, FLAG), ADAM, unfit),
        "two flags": ("adam_step_", (*[MATRIX] * 4, VECTOR, flags), ADAM, unfit),
        "two sizes": ("finish_direction_", (*[MATRIX] * 2, *[VECTOR, TWO] * 2, FLAG), {}, unfit),
        "a higher result": (
            "finish_direction_",
            (HIGHER, MATRIX, VECTOR, None, VECTOR, VECTOR, FLAG),
            {},
            r"out_nOI does not fit .* got torch.float32 \(1, 3, 2\)",
        ),
    }


def test_wrong_arguments_are_named(ops):
    for case, (op, arguments, options, message) in wrong_calls().items():
        if op in ops:
            with pytest.raises(ValueError, match=message) as raised:
                ops[op](*arguments, **options)
            assert not isinstance(raised.value, NotMadeFor), case


def gapped(x: torch.Tensor) -> torch.Tensor:
    """The same values, no two of them beside each other."""
    if x.ndim == 0 or not x.is_floating_point():
        return x
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).flatten(-2)[..., ::2]


def unusual(call: Call, form: str) -> Iterator[Call]:
    """The call with other arguments or options of the same values."""
    if form == "betas in memory":
        options = {"betas": (torch.tensor(0.9), 0.95)} if "betas" in call.options else {}
        yield replace(call, options={**call.options, **options})
    elif form == "fp64":
        sums = call.arguments[: "syrk" in call.op]  # always in fp32
        others = copied(call.arguments[len(sums) :], torch.float64)
        yield replace(call, arguments=(*sums, *others))
    else:
        leaves, structure = tree_flatten(call.arguments)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                others = [*leaves[:place], gapped(leaf), *leaves[place + 1 :]]
                yield replace(call, arguments=tree_unflatten(others, structure))


@pytest.mark.parametrize("form", ["fp64", "with gaps", "betas in memory"])
def test_what_a_backend_is_not_made_for_is_refused_before_a_write_and_done_by_torch(ops, form):
    if "block_syrk_accumulate_" in ops:
        pytest.skip("torch is made for everything")
    refused = set()
    for op in ops:
        calls = [other for call in calls_of(op, "cpu", FEW) for other in unusual(call, form)]
        for call in calls:
            arguments = copied(call.arguments)
            try:
                assert not problems(call, ops[op](*arguments, **call.options), arguments)
            except NotMadeFor:
                refused.add(op)
                pairs = zip(tensors_of(arguments), tensors_of(call.arguments), strict=True)
                assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
            arguments = copied(call.arguments)
            returned = guarded("a backend", op, ops[op])(*arguments, **call.options)
            assert not problems(call, returned, arguments)
    expected = {"fp64": set(ops), "betas in memory": {"adam_step_"} & ops.keys()}
    assert refused == expected.get(form, refused) and (refused or "adam_step_" not in ops)


def test_a_cuda_op_refuses_tensors_of_another_device():
    with pytest.raises(NotMadeFor, match=r"one cuda device, got \['cpu'\]"):
        CudaOps(emulated()._library).symmetric_pack_into_(torch.zeros(6), [0], [torch.zeros(3, 3)])
