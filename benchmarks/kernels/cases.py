"""What is timed: an op on a model's shapes, its result, the library's way, and the least cost.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle, O and I the sides of a
layer's matrix.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops.functional import packed_numel

Op = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Attributes:
    nbytes, flops: the least that any implementation must move and compute.
    run: calls an implementation on prepared tensors.
    error: (largest relative error of an implementation, largest allowed), against float64; outputs
    start as NaN. baselines: name -> the same with the library's functions.
    """

    op: str
    size: str
    nbytes: int
    flops: int
    run: Callable[[Op], Any]
    error: Callable[[Op], tuple[float, float]]
    baselines: dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Settings:
    """Attributes:
    rows: N of a factor's batch.
    blocks: of a model whose factors are in one call.
    max_dim: larger factors are left out.
    dtype: of rows.
    wires: of packed buffers.
    """

    device: str
    rows: int
    blocks: int
    max_dim: int
    dtype: torch.dtype
    wires: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)


def worst(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value; infinite where something is not finite."""
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(
        min=1e-30
    )
    return float(difference.nan_to_num(nan=float("inf")))


def dense(packed_P: Tensor, dim: int) -> Tensor:
    """[D, D], by another way than any implementation's."""
    lower_DD = packed_P.new_zeros(dim, dim)
    lower_DD[torch.ones(dim, dim, dtype=torch.bool, device=packed_P.device).tril()] = packed_P
    return lower_DD + lower_DD.tril(-1).T


def product(x_ND: Tensor) -> Tensor:
    """X^T X as the library does it, in fp32."""
    if x_ND.is_cuda and x_ND.dtype != torch.float32:
        return torch.mm(x_ND.T, x_ND, out_dtype=torch.float32)
    return x_ND.T.float() @ x_ND.float()


def product_tf32(x_ND: Tensor) -> Tensor:
    """X^T X of fp32 rows by the library, rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return product(x_ND)
    finally:
        torch.set_float32_matmul_precision(before)


def rounding(rows: int, dtype: torch.dtype) -> float:
    """Return the relative error that a second moment may have.

    Tensor cores add in fp32 but round toward zero at every 16 rows of a 16-bit product, each time
    by less than 2**-23 of the sum: an H100 is off by up to 3.6e-5 at 8192 rows.
    """
    return 1e-5 if dtype == torch.float32 else max(1e-5, rows / 16 * 2**-23)


def syrk(settings: Settings, dim: int, *, masked: bool = False) -> Case:
    """Rows to a packed sum; a side such as 769 is 768 and a bias, whose column of ones no op reads.

    Args:
        masked: whether every fourth row does not count. The library's way is then to multiply a
        masked copy.
    """
    x_ND = settings.normal(settings.rows, dim, dtype=settings.dtype)
    options: dict[str, Any] = {}
    rows_ND = x_ND
    if dim % 8 == 1 and dim > 8:
        x_ND[:, -1] = 1
        rows_ND, options = x_ND[:, :-1].contiguous(), {"bias": True}
    kept = None
    count = settings.rows
    if masked:
        kept = torch.arange(settings.rows, device=settings.device) % 4 > 0
        count = int(kept.sum())
        options["kept"] = kept
    sum_P, average_DD = (
        torch.zeros(shape, device=settings.device) for shape in (packed_numel(dim), (dim, dim))
    )
    index = torch.tril_indices(dim, dim, device=settings.device)

    def error(op: Op) -> tuple[float, float]:
        found_P = torch.zeros_like(sum_P)
        op(found_P, rows_ND, **options)
        x = (x_ND if kept is None else x_ND[kept]).double()
        probes = settings.normal(dim, 2).double()  # Freivalds' check: no product in float64
        return worst(dense(found_P.double(), dim) @ probes, x.T @ (x @ probes)), rounding(
            settings.rows, x_ND.dtype
        )

    def masked_ND() -> Tensor:  # a copy if some rows do not count
        return x_ND if kept is None else torch.where(kept[:, None], x_ND, 0.0)

    def symmetrised() -> Tensor:
        covariance = product(masked_ND()) / count
        average_DD.lerp_((covariance + covariance.T) / 2, 0.05)
        return average_DD[index[0], index[1]]

    nbytes = count * dim * x_ND.itemsize + 2 * sum_P.nbytes + (0 if kept is None else kept.nbytes)
    baselines = {"mm": lambda: product(masked_ND()), "mm, average, pack": symmetrised}
    if x_ND.is_cuda and x_ND.dtype == torch.float32:
        baselines["mm in TF32"] = lambda: product_tf32(masked_ND())
    size = f"N {f'{count} of ' if masked else ''}{settings.rows}, D {dim}"
    flops = count * dim * (dim + 1)
    return Case(
        "syrk_accumulate_",
        size,
        nbytes,
        flops,
        lambda op: op(sum_P, rows_ND, **options),
        error,
        baselines,
    )


def layout(dims: Sequence[int]) -> tuple[list[int], int]:
    """Aligned starts of triangles in a flat buffer, and its length."""
    starts, end = [], 0
    for dim in dims:
        starts.append(end)
        end += -(-packed_numel(dim) // 32) * 32
    return starts, end


def packing(settings: Settings, name: str, dims: Sequence[int]) -> Iterator[Case]:
    """Many layers to a flat buffer and back, for each dtype of the buffer."""
    matrices = [(x := settings.normal(dim, dim)) + x.T for dim in dims]
    starts, end = layout(dims)
    spans = [
        slice(start, start + packed_numel(dim)) for start, dim in zip(starts, dims, strict=True)
    ]
    index = {dim: torch.tril_indices(dim, dim, device=settings.device) for dim in set(dims)}
    elements, squares = sum(map(packed_numel, dims)), sum(dim * dim for dim in dims)
    for wire in settings.wires:
        out = torch.empty(end, dtype=wire, device=settings.device)
        packed = torch.zeros_like(out)
        for span, x in zip(spans, matrices, strict=True):
            packed[span] = x[tuple(index[len(x)])].to(wire)

        def pack_error(op: Op, wire=wire, packed=packed) -> tuple[float, float]:
            found = torch.full((end,), float("nan"), dtype=wire, device=settings.device)
            op(found, starts, matrices)
            return max(worst(found[span], packed[span]) for span in spans), 0.0

        def unpack_error(op: Op, wire=wire, packed=packed) -> tuple[float, float]:
            found = op(packed, starts, dims)
            return max(worst(x, y.to(wire)) for x, y in zip(found, matrices, strict=True)), 0.0

        def indexed_pack(out=out) -> None:
            for span, x in zip(spans, matrices, strict=True):
                rows, columns = index[len(x)]
                out[span] = x[rows, columns].to(out.dtype)

        def indexed_unpack(packed=packed) -> list[Tensor]:
            found = []
            for span, dim in zip(spans, dims, strict=True):
                rows, columns = index[dim]
                x = torch.empty(dim, dim, device=settings.device)
                x[rows, columns] = x[columns, rows] = packed[span].float()
                found.append(x)
            return found

        size = f"{name}, {len(dims)} factors, {str(wire).removeprefix('torch.')}"
        yield Case(
            "symmetric_pack_into_",
            size,
            (4 + wire.itemsize) * elements,
            0,
            lambda op, out=out: op(out, starts, matrices),
            pack_error,
            {"indexing": indexed_pack},
        )
        yield Case(
            "symmetric_unpack_from",
            size,
            wire.itemsize * elements + 4 * squares,
            0,
            lambda op, packed=packed: op(packed, starts, dims),
            unpack_error,
            {"indexing": indexed_unpack},
        )


def averages(settings: Settings, name: str, dims: Sequence[int]) -> Case:
    """Running averages of many layers."""
    old, sums = ([settings.normal(packed_numel(dim)) for dim in dims] for _ in range(2))
    counts = [torch.tensor(float(settings.rows), device=settings.device) for _ in dims]
    updates = [torch.full((), 3.0, device=settings.device) for _ in dims]
    decays = [0.95] * len(dims)

    def error(op: Op) -> tuple[float, float]:
        found = [x.clone() for x in old]
        used = op(found, sums, counts, [x.clone() for x in updates], decays)
        pairs = zip(found, old, sums, strict=True)
        errors = [
            worst(x, 0.75 * y.double() + 0.25 * total.double() / settings.rows)
            for x, y, total in pairs
        ]
        return max(errors) if bool(used.all()) else float("inf"), 1e-6

    state = [x.clone() for x in old]

    def foreach() -> None:  # neither checked nor corrected for bias
        torch._foreach_lerp_(state, torch._foreach_div(sums, counts), 0.05)

    elements = sum(map(packed_numel, dims))
    counted = [x.clone() for x in updates]
    return Case(
        "ema_update_",
        f"{name}, {len(dims)} factors",
        12 * elements,
        4 * elements,
        lambda op: op(state, sums, counts, counted, decays),
        error,
        {"foreach": foreach},
    )


def adam_step(settings: Settings, outputs: int, inputs: int, matrices: int = 1) -> Case:
    """A step of Adam for several matrices: moments in place, and the direction."""
    x_nOI, first_nOI, second_nOI = (settings.normal(matrices, outputs, inputs) for _ in range(3))
    second_nOI = second_nOI.square()
    updates = torch.full((matrices,), 10.0, device=settings.device)
    usable = torch.ones(matrices, dtype=torch.bool, device=settings.device)
    direction_nOI, options = torch.empty_like(x_nOI), {"betas": (0.9, 0.95), "eps": 1e-8}
    beta1, beta2 = options["betas"]
    state = [part.clone() for part in (first_nOI, second_nOI, updates)]

    def error(op: Op) -> tuple[float, float]:
        x, first, second = x_nOI.double(), first_nOI.double(), second_nOI.double()
        first, second = beta1 * first + (1 - beta1) * x, beta2 * second + (1 - beta2) * x.square()
        ahead = beta1 * first / (1 - beta1**12) + (1 - beta1) * x / (1 - beta1**11)
        direction = ahead / ((second / (1 - beta2**11)).sqrt() + options["eps"])
        found = (
            torch.full_like(x_nOI, math.nan),
            first_nOI.clone(),
            second_nOI.clone(),
            updates.clone(),
        )
        op(found[0], x_nOI, *found[1:], usable, **options)
        return max(map(worst, found, (direction, first, second, updates + 1))), 1e-5

    def elementwise() -> Tensor:
        first, second, updates = state
        first.lerp_(x_nOI, 1 - beta1)
        second.lerp_(x_nOI.square(), 1 - beta2)
        k = updates.add_(1)[:, None, None]
        root = (second / (1 - beta2**k)).sqrt_().add_(options["eps"])
        ahead = first * (beta1 / (1 - beta1 ** (k + 1))) + x_nOI * ((1 - beta1) / (1 - beta1**k))
        return ahead.div_(root)

    elements = matrices * outputs * inputs
    return Case(
        "adam_step_",
        f"{matrices} x {outputs} x {inputs}",
        24 * elements,
        14 * elements,
        lambda op: op(direction_nOI, x_nOI, *state, usable, **options),
        error,
        {"elementwise": elementwise},
    )
