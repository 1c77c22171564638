"""Calls of every op with what they must give in float64, on any device, at small odd sizes and at
real ones: by op.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a
layer's matrix.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import rounding
from ds_kfac.ops.functional import packed_numel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """Attributes:
    arguments, options: of the op; changed by ops that work in place.
    wanted: float64, or for what must be exact the dtype itself.
    given: picks from (returned, arguments) what ``wanted`` is about.
    allowed: largest difference relative to the largest wanted value; 0 compares bits, NaN included.
    """

    op: str
    label: str
    arguments: tuple
    wanted: list[Tensor]
    given: Callable[[Any, tuple], Sequence[Tensor]]
    allowed: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    layers: sides of the factors of one call over many layers.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    layers: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]


SMALL = Sizes((1, 65), (1, 2, 63, 129, 257), (1, 2, 63, 129, 257), ((1, 1), (63, 129), (257, 2)))
REAL = Sizes(
    (2048, 8192),
    (1, 63, 257, 768, 769, 1024, 1600, 2048, 4096, 4097, 6400),
    (768, 3072, 769, 1600, 63, 4097, 1, 1024),
    ((768, 769), (3072, 769), (1600, 6401), (4096, 4097), (63, 8192)),
)


def normal(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def triangle(x_DD: Tensor) -> Tensor:
    """Packed lower triangle, by a mask."""
    return x_DD[torch.ones(x_DD.shape, dtype=torch.bool, device=x_DD.device).tril()]


def laid_out(x_ND: Tensor, layout: str) -> Tensor:
    """The same values: contiguous, rows apart, not aligned, or transposed in memory; NaN around
    them."""
    rows, dim = x_ND.shape
    if layout == "transposed":
        return x_ND.T.contiguous().T
    first, width = {
        "contiguous": (0, dim),
        "apart": (8, -(-dim // 8) * 8 + 16),
        "shifted": (1, dim + 2),
    }[layout]
    wide = x_ND.new_full((rows, width), float("nan"))
    wide[:, first : first + dim] = x_ND
    return wide[:, first : first + dim]


def some_rows(x_ND: Tensor) -> Tensor:
    """Bool [N]: two rows of three count. The others get NaN."""
    kept = torch.arange(len(x_ND), device=x_ND.device) % 3 > 0
    x_ND[~kept] = float("nan")
    return kept


def counted_rows(x_ND: Tensor, kept: Tensor | None, bias: bool) -> Tensor:
    """The rows that count, in float64, with a column of ones for a bias."""
    rows = (x_ND if kept is None else x_ND[kept]).double()
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1) if bias else rows


def syrk_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    layouts = ("contiguous", "apart", "shifted", "transposed")
    scales = (1.0, 0.37, torch.tensor(0.37, device=device))
    for index, (rows, dim, dtype) in enumerate(product(sizes.rows, sizes.dims, DTYPES)):
        x_ND = laid_out(
            normal(device, rows, dim, seed=index).to(dtype), layout := layouts[index // 2 % 4]
        )
        bias = index % 2 == 1
        kept = some_rows(x_ND) if index // 3 % 2 else None
        wide = counted_rows(x_ND, kept, bias)
        start = normal(device, packed_numel(wide.shape[1]), seed=1)
        scale = scales[index // 3 % 3]
        parts = f"{'all' if kept is None else 'some'} rows {'with a bias' if bias else ''}"
        label = f"{rows} x {dim} {dtype} {layout} {parts} times {scale}"
        wanted = start.double() + float(scale) * triangle(wide.T @ wide)
        yield Call(
            "syrk_accumulate_",
            label,
            (start, x_ND),
            [wanted],
            lambda found, _: [found],
            rounding(rows, dtype),
            {"kept": kept, "bias": bias, "scale": scale},
        )


def block_syrk_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    for rows, block in product(sizes.rows, (1, 7, 128)):
        x_ND = normal(device, rows, 3 * block)
        kept = some_rows(x_ND) if block < 128 else None
        start = normal(device, 3 * packed_numel(block), seed=1)
        parts = [
            triangle(part.T @ part)
            for part in counted_rows(x_ND, kept, bias=False).split(block, dim=1)
        ]
        scale = torch.tensor(0.37, device=device) if block == 7 else 1.0
        wanted = start.double() + float(scale) * torch.cat(parts)
        yield Call(
            "block_syrk_accumulate_",
            f"{rows} x 3 x {block}",
            (start, x_ND),
            [wanted],
            lambda found, _: [found],
            1e-5,
            {"block": block, "kept": kept, "scale": scale},
        )


def adam_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """A step of two matrices, of which one may be unusable; the direction may take the gradients'
    place."""
    cases = ((0.0, True, False), (7.0, True, True), (3.0, False, True))
    for (outputs, inputs), (updates, usable, in_place) in product(sizes.gradients, cases):
        x_nOI, first_nOI, second_nOI = (
            normal(device, 2, outputs, inputs, seed=seed) for seed in range(3)
        )
        second_nOI = second_nOI.square()
        usable_n, updates_n = (
            torch.tensor([True, usable], device=device),
            torch.tensor([1.0, updates], device=device),
        )
        x_nOI[1] = x_nOI[1] if usable else float("nan")
        b1, b2 = torch.tensor((0.9, 0.95), device=device).double()  # as fp32 has them
        x, m, v, k = (
            x_nOI.double(),
            first_nOI.double(),
            second_nOI.double(),
            (updates_n.double() + 1)[:, None, None],
        )
        new_m, new_v = b1 * m + (1 - b1) * x, b2 * v + (1 - b2) * x.square()
        numerator = b1 * new_m / (1 - b1 ** (k + 1)) + (1 - b1) * x / (1 - b1**k)
        direction = numerator / ((new_v / (1 - b2**k)).sqrt() + 1e-3)
        before, after = (torch.zeros_like(x), m, v), (direction, new_m, new_v)
        wanted = [
            torch.where(usable_n[:, None, None], new, old)
            for new, old in zip(after, before, strict=True)
        ]
        out = x_nOI if in_place else torch.full_like(x_nOI, float("nan"))
        yield Call(
            "adam_step_",
            f"{outputs} x {inputs}, {updates} updates{' in place' if in_place else ''}",
            (out, x_nOI, first_nOI, second_nOI, updates_n, usable_n),
            [*wanted, updates_n.double() + usable_n],
            lambda _, arguments: [arguments[index] for index in (0, 2, 3, 4)],
            1e-5,
            {"betas": (0.9, 0.95), "eps": 1e-3},
        )


def finish_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """Of four directions one has not its full size, one is no number, one may not be stepped
    along."""
    for (outputs, inputs), sized in product(sizes.gradients, (True, False)):
        x_nOI = normal(device, 4, outputs, inputs)
        rows = [0.3, 7.0, 2.0, 2.0], [5.0, 0.25, 1.0, 1.0], [1.5] * 4
        size, target, full = (torch.tensor(row, device=device) for row in rows)
        used = torch.tensor([True, True, True, False], device=device)
        scale = target.double()
        if sized:
            scale = scale * (size.double() / full).clamp(max=1) / x_nOI.double().norm(dim=(1, 2))
        wanted = x_nOI.double() * scale[:, None, None]
        x_nOI[1] = float("nan")
        wanted[1], wanted[3] = 0.0, 0.0
        norm = torch.linalg.vector_norm(x_nOI, dim=(1, 2))
        x_nOI[3] = float("inf")
        vectors = norm, size if sized else None, target, full, used
        label = f"{outputs} x {inputs}{' by sizes' if sized else ''}"
        stored = lambda _, arguments: [arguments[0]]  # noqa: E731
        yield Call(
            "finish_direction_", label, (x := x_nOI.clone(), x, *vectors), [wanted], stored, 1e-5
        )
        for dtype, layers in ((torch.float32, 4), (torch.float32, 2), (torch.bfloat16, 1)):
            out = torch.full(
                (layers, x_nOI.numel() // layers + 3), float("nan"), dtype=dtype, device=device
            )
            out = out[:, 3:].unflatten(1, (-1, inputs))  # with gaps
            more = (
                f"{label}, {len(x_nOI) // layers} in a result, {str(dtype).removeprefix('torch.')}"
            )
            allowed, rows = max(1e-5, torch.finfo(dtype).eps), [wanted.view(out.shape)]
            yield Call(
                "finish_direction_", more, (out, x_nOI.clone(), *vectors), rows, stored, allowed
            )


EXTREMES = (
    math.nan,
    math.inf,
    -math.inf,
    1e-40,
    6e-8,
    2.5e-8,
    65519,
    65520,
    3.4e38,
    1.00390625,
    1.01171875,
    -2049,
)


def packing_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """Pack and unpack, with gaps of NaN between triangles that must stay; exact."""
    dims = sizes.layers
    matrices = [(x := normal(device, dim, dim, seed=dim)) + x.T for dim in dims]
    starts, end = [], 5
    for dim, x in zip(dims, matrices, strict=True):
        x[-1:, 1 : 1 + len(EXTREMES)] = torch.tensor(EXTREMES[: max(dim - 1, 0)], device=device)
        x.T[-1:] = x[-1:]
        starts.append(end)
        end += packed_numel(dim) + 3
    for dtype in DTYPES:
        packed = torch.full((end,), float("nan"), dtype=dtype, device=device)
        for start, x in zip(starts, matrices, strict=True):
            packed[start : start + packed_numel(len(x))] = triangle(x).to(dtype)
        out = torch.full_like(packed, float("nan"))
        for layout in ("contiguous", "apart"):
            arguments = (out.clone(), starts, [laid_out(x, layout) for x in matrices])
            yield Call(
                "symmetric_pack_into_",
                f"{dtype} {layout}",
                arguments,
                [packed],
                lambda _, x: [x[0]],
                0.0,
            )
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
    used = torch.tensor(
        [float(index not in (1, 2)) for index in range(len(numels))], device=device
    ).double()
    later = torch.stack(updates).double() + used

    def given(found: Tensor, arguments: tuple) -> list[Tensor]:
        return [*arguments[0], found.double(), torch.stack(arguments[3])]

    arguments = (averages, totals, counts, updates, decays)
    yield Call(
        "ema_update_", f"sides {sizes.layers}", arguments, [*wanted, used, later], given, 1e-6
    )


CALLS: dict[str, Callable[[str, Sizes], Iterator[Call]]] = {
    "syrk_accumulate_": syrk_calls,
    "block_syrk_accumulate_": block_syrk_calls,
    "symmetric_pack_into_": packing_calls,
    "symmetric_unpack_from": packing_calls,
    "ema_update_": average_calls,
    "adam_step_": adam_calls,
    "finish_direction_": finish_calls,
}


def calls_of(op: str, device: str, sizes: Sizes) -> Iterator[Call]:
    return (call for call in CALLS[op](device, sizes) if call.op == op)
