"""Calls of the ops over many layers, see ``calls.py``; and all calls by op."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ds_kfac.ops.functional import packed_numel
from tests.gpu.calls import (
    DTYPES,
    Call,
    Sizes,
    adam_calls,
    block_syrk_calls,
    finish_calls,
    laid_out,
    normal,
    syrk_calls,
    triangle,
)  # fmt: skip


def packing_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """Pack and unpack, with gaps of NaN between triangles that must stay; exact."""
    dims = sizes.layers
    matrices = [(x := normal(device, dim, dim, seed=dim)) + x.T for dim in dims]
    starts, end = [], 5
    for dim in dims:
        starts.append(end)
        end += packed_numel(dim) + 3
    for dtype in DTYPES:
        packed = torch.full((end,), float("nan"), dtype=dtype, device=device)
        for start, x in zip(starts, matrices, strict=True):
            packed[start : start + packed_numel(len(x))] = triangle(x).to(dtype)
        out = torch.full_like(packed, float("nan"))
        for layout in ("contiguous", "apart"):
            arguments = (out.clone(), starts, [laid_out(x, layout) for x in matrices])
            yield Call("symmetric_pack_into_", f"{dtype} {layout}", arguments, [packed], lambda _, x: [x[0]], 0.0)
        wanted, arguments = [x.to(dtype).float() for x in matrices], (packed, starts, list(dims))
        yield Call("symmetric_unpack_from", str(dtype), arguments, wanted, lambda x, _: x, 0.0)


def average_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """One layer in three has no rows, one a sum that is not finite: those keep what they had."""
    numels = [packed_numel(dim) for dim in sizes.layers]
    averages = [normal(device, numel, seed=numel) for numel in numels]
    totals = [10 * normal(device, numel, seed=numel + 1) for numel in numels]
    counts = [torch.tensor(float(3 + index), device=device) for index in range(len(numels))]
    updates = [torch.tensor(float(index), device=device) for index in range(len(numels))]
    decays = [0.95] * len(numels)
    counts[1].zero_()
    totals[2][-1] = float("inf")
    wanted = []
    for index, (average, total) in enumerate(zip(averages, totals, strict=True)):
        keep = 1.0 if index in (1, 2) else min(1 - 1 / (index + 1), 0.95)
        fresh = torch.zeros_like(total.double()) if keep == 1.0 else total.double() / (3 + index)
        wanted.append(keep * average.double() + (1 - keep) * fresh)
    used = torch.tensor([float(index not in (1, 2)) for index in range(len(numels))], device=device).double()
    later = torch.stack(updates).double() + used

    def given(found: Tensor, arguments: tuple) -> list[Tensor]:
        return [*arguments[0], found.double(), torch.stack(arguments[3])]

    arguments = (averages, totals, counts, updates, decays)
    yield Call("ema_update_", f"sides {sizes.layers}", arguments, [*wanted, used, later], given, 1e-6)


CALLS: dict[str, Callable[[str, Sizes], Iterator[Call]]] = {
    "syrk_accumulate_": syrk_calls,
    "block_syrk_accumulate_": block_syrk_calls,
    "symmetric_pack_into_": packing_calls,
    "symmetric_unpack_from": packing_calls,
    "ema_update_": average_calls,
    "adam_scale_": adam_calls,
    "adam_fold_": adam_calls,
    "finish_direction_": finish_calls,
}


def calls_of(op: str, device: str, sizes: Sizes) -> Iterator[Call]:
    return (call for call in CALLS[op](device, sizes) if call.op == op)
