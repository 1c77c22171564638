"""Calls of every op on any device, at small odd sizes and at real ones, with the results of the
specification in float64.

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
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.kernels.cases import rounding
from ds_kfac.ops import functional
from ds_kfac.ops.functional import packed_numel
from tests.ops import specification

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


@dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        arguments, options: of the op, which may change its arguments.
        allowed: largest difference relative to the largest expected value; 0 compares bits.
        expected: all tensors that the specification returns or leaves in its arguments, in float64
            unless bits are compared.
    """

    op: str
    label: str
    arguments: tuple
    allowed: float
    options: dict[str, Any] = field(default_factory=dict)
    expected: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        arguments = copied(self.arguments, None if self.allowed == 0 else torch.float64)
        returned = getattr(specification, self.op)(*arguments, **self.options)
        object.__setattr__(self, "expected", tensors_of((returned, arguments)))


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


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def copied(value: Any, dtype: torch.dtype | None = None, device: str | None = None) -> Any:
    """Tensors in a structure anew, with their strides; floating ones in ``dtype`` if it is given. A
    tensor that is there twice, as a result in the place of an argument, is copied once."""
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if id(x) not in copies:
            kind = dtype if dtype and x.is_floating_point() else x.dtype
            new = torch.empty_strided(x.shape, x.stride(), dtype=kind, device=device or x.device)
            copies[id(x)] = new.copy_(x)
        return copies[id(x)]

    return tree_map_only(Tensor, copy, value)


def problems(call: Call, returned: Any, arguments: tuple) -> list[str]:
    """What differs from the specification; nothing for a right result."""
    found = []
    for index, (x, expected) in enumerate(
        zip(tensors_of((returned, arguments)), call.expected, strict=True)
    ):
        place = f"{call.label}, tensor {index}"
        if x.shape != expected.shape:
            found.append(f"{place}: shape {tuple(x.shape)}, not {tuple(expected.shape)}")
            continue
        same_dtype = call.allowed > 0 or x.dtype == expected.dtype
        x, expected = x.double(), expected.double()
        finite = expected.isfinite() & (call.allowed > 0)
        same = finite | (x == expected) | (x.isnan() & expected.isnan())
        if not same.all() or not same_dtype:
            found.append(f"{place}: {int((~same).sum())} of {x.numel()} elements differ")
        if finite.any():
            largest = expected[finite].abs().max().clamp(min=1e-30)
            error = float((x[finite] - expected[finite]).abs().max() / largest)
            if not error <= call.allowed:
                found.append(f"{place}: error {error:.2e}, allowed {call.allowed:.0e}")
    return found


def spoiled(op: str, value: float = 1.01, output: int = 0) -> Callable[..., Any]:
    """torch's op with one element of one result (returned, or written to an argument) ``value``
    times as large, or ``value`` if that is not finite."""

    def run(*arguments: Any, **options: Any) -> Any:
        found = getattr(functional, op)(*arguments, **options)
        results = [x for x in tensors_of((found, arguments)) if x.is_floating_point()]
        x = results[output].view(-1)
        place = x.nan_to_num(0.0, 0.0, 0.0).abs().argmax()  # not a gap that nobody writes
        x[place] = x[place] * value if math.isfinite(value) else value
        return found

    return run


def normal(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


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
    wide = x_ND.new_full((rows, width), NAN)
    wide[:, first : first + dim] = x_ND
    return wide[:, first : first + dim]


def some_rows(x_ND: Tensor) -> Tensor:
    """Bool [N]: two rows of three count. The others get NaN."""
    kept = torch.arange(len(x_ND), device=x_ND.device) % 3 > 0
    x_ND[~kept] = NAN
    return kept


def syrk_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    layouts = ("contiguous", "apart", "shifted", "transposed")
    scales = (1.0, 0.37, torch.tensor(0.37, device=device))
    for index, (rows, dim, dtype) in enumerate(product(sizes.rows, sizes.dims, DTYPES)):
        layout = layouts[index // 2 % 4]
        x_ND = laid_out(normal(device, rows, dim, seed=index).to(dtype), layout)
        options = {
            "bias": index % 2 == 1,
            "kept": some_rows(x_ND) if index // 3 % 2 else None,
            "scale": scales[index // 3 % 3],
        }
        start = normal(device, packed_numel(dim + options["bias"]), seed=1)
        label = f"{rows} x {dim} {dtype} {layout} {options}"
        yield Call("syrk_accumulate_", label, (start, x_ND), rounding(rows, dtype), options)


def block_syrk_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    for rows, block in product(sizes.rows, (1, 7, 128)):
        x_ND = normal(device, rows, 3 * block)
        options = {
            "block": block,
            "kept": some_rows(x_ND) if block < 128 else None,
            "scale": torch.tensor(0.37, device=device) if block == 7 else 1.0,
        }
        start = normal(device, 3 * packed_numel(block), seed=1)
        label = f"{rows} x 3 x {block}"
        yield Call("block_syrk_accumulate_", label, (start, x_ND), 1e-5, options)


def adam_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """A step of two matrices, of which one may be unusable; the direction may take the gradients'
    place."""
    cases = ((0.0, True, False, 1e-3), (7.0, True, True, 1e-3), (3.0, False, True, 0.0))
    for (outputs, inputs), case in product(sizes.gradients, cases):
        updates, usable, in_place, eps = case
        x, first, second = (normal(device, 2, outputs, inputs, seed=seed) for seed in range(3))
        if not usable:
            x[1, 0, 0], x[1, -1, -1] = math.inf, NAN
        out = x if in_place else torch.full_like(x, NAN)
        moments = first, second.square()
        counts = torch.tensor([1.0, updates], device=device)
        flags = torch.tensor([True, usable], device=device)
        label = f"{outputs} x {inputs}, {updates} updates{' in place' if in_place else ''}"
        options = {"betas": (0.9, 0.95), "eps": eps}
        yield Call("adam_step_", label, (out, x, *moments, counts, flags), 1e-5, options)


def finish_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """Of six directions one has not its full size, one is no number, one may not be stepped along,
    one has norm 0 and one size 0."""
    rows = [0.3, 7.0, 2.0, 2.0, 1.0, 0.0], [5.0, 0.25, 1.0, 1.0, 1.0, 1.0], [1.5] * 6
    size, target, full = (torch.tensor(row, device=device) for row in rows)
    used = torch.tensor([True, True, True, False, True, True], device=device)
    for (outputs, inputs), sized in product(sizes.gradients, (True, False)):
        x = normal(device, 6, outputs, inputs)
        x[1], x[3], x[4] = NAN, math.inf, 0.0
        vectors = torch.linalg.vector_norm(x, dim=(1, 2)), size if sized else None, target, full
        label = f"{outputs} x {inputs}{' by sizes' if sized else ''}"
        own = x.clone()
        yield Call("finish_direction_", label, (own, own, *vectors, used), 1e-5)
        for dtype, layers in ((torch.float32, 6), (torch.float32, 3), (torch.bfloat16, 1)):
            gaps = torch.full((layers, x.numel() // layers + 3), NAN, dtype=dtype, device=device)
            out = gaps[:, 3:].unflatten(1, (-1, inputs))
            more = f"{label}, {6 // layers} in a result, {dtype}"
            allowed = max(1e-5, torch.finfo(dtype).eps)
            yield Call("finish_direction_", more, (out, x.clone(), *vectors, used), allowed)


EXTREMES = (math.nan, math.inf, -math.inf, 1e-40, 6e-8, 2.5e-8)
EXTREMES += (65519, 65520, 3.4e38, 1.00390625, 1.01171875, -2049)


def packing_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """Pack and unpack, with gaps of NaN between triangles that must stay; exact."""
    matrices, starts, end = [], [], 5
    for dim in sizes.layers:
        x = normal(device, dim, dim, seed=dim)
        x[-1:, 1 : 1 + len(EXTREMES)] = torch.tensor(EXTREMES[: max(dim - 1, 0)], device=device)
        x.T[-1:] = x[-1:]
        matrices.append(x.tril() + x.tril(-1).T)
        starts.append(end)
        end += packed_numel(dim) + 3
    for dtype in DTYPES:
        out = torch.full((end,), NAN, dtype=dtype, device=device)
        for layout in ("contiguous", "apart"):
            arguments = (out.clone(), starts, [laid_out(x, layout) for x in matrices])
            yield Call("symmetric_pack_into_", f"{dtype} {layout}", arguments, 0.0)
        packed = out.clone()
        specification.symmetric_pack_into_(packed, starts, matrices)
        arguments = (packed, starts, list(sizes.layers))
        yield Call("symmetric_unpack_from", str(dtype), arguments, 0.0)


def average_calls(device: str, sizes: Sizes) -> Iterator[Call]:
    """One layer has no rows, and two a sum that is not finite in its first or last element: those
    keep what they had."""
    numels = [packed_numel(dim) for dim in sizes.layers]
    averages = [normal(device, numel, seed=numel) for numel in numels]
    sums = [10 * normal(device, numel, seed=numel + 1) for numel in numels]
    counts = [torch.tensor(0.5 + index, device=device) for index in range(len(numels))]
    updates = [torch.tensor(float(index), device=device) for index in range(len(numels))]
    decays = [(0.95, 0.9, 0.9, 0.9, 0.4)[index % 5] for index in range(len(numels))]
    counts[1].zero_()
    sums[2][-1] = math.inf
    sums[3][0] = NAN
    arguments = (averages, sums, counts, updates, decays)
    yield Call("ema_update_", f"sides {sizes.layers}", arguments, 1e-6)


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


def configured(
    syrk: Any, config: Any, device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int]]
) -> list[str]:
    """What is wrong with products (rows, side) of a SYRK module by one configuration."""
    found = []
    for (rows, dim), (masked, scale) in product(shapes, ((False, 0.37), (True, 1.0))):
        x_ND = laid_out(normal(device, rows, dim).to(dtype), "apart")
        kept = some_rows(x_ND) if masked else None
        options = {"kept": kept, "bias": True, "scale": scale}
        total = torch.zeros(packed_numel(dim + 1), device=device)
        label = f"{rows} x {dim} {dtype} {options} {config}"
        call = Call("syrk_accumulate_", label, (total, x_ND), rounding(rows, dtype), options)
        syrk.accumulate(total, x_ND, config, **options)
        found += problems(call, total, call.arguments)
    return found
