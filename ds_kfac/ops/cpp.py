"""Backend ``cpp``: the C++ ops of csrc/cpu, for fp32 state on the CPU.

The products of ``syrk_accumulate_`` are torch's; what surrounds them is one pass over memory each. Another dtype or
layout, or a general exponent, raises NotMadeFor, see ``ops/guarded.py``.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops.cpp_library import DTYPES, integers, library, plain, pointers
from ds_kfac.ops.guarded import NotMadeFor, of
from ds_kfac.ops.reference import blocks_numel, packed_numel

SMALL_SIDE, SMALL_BLOCK, BLOCK = 512, 128, 256
"""Rows of a product of ``syrk_accumulate_``, up to this side and above: fewer waste less of the diagonal blocks, more
are faster products."""


def load() -> Mapping[str, Callable[..., Any]]:
    """Op name -> implementation.

    Raises:
        RuntimeError: it cannot run, and why.
    """
    library()
    ops = (
        syrk_accumulate_, symmetric_pack_into_, symmetric_unpack_from, ema_update_, similarity, eigen_scale,
        eigen_scale_dot, corrected_scale_dot, adam_scale,
    )  # fmt: skip
    return {op.__name__: op for op in ops}


def syrk_accumulate_(
    sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None, scale: Tensor | float = 1.0
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.syrk_accumulate_`."""
    dim = x_ND.shape[1]
    ones = ones_column is not None
    if not plain(sum_P) or sum_P.shape != (packed_numel(dim + ones),) or not x_ND.is_floating_point():
        raise NotMadeFor(f"syrk_accumulate_: expected floating rows and their plain fp32 sum, got {of(x_ND, sum_P)}")
    add_lower, threads, scale = library().ds_kfac_add_lower, torch.get_num_threads(), float(scale)
    with torch.autocast("cpu", enabled=False):
        x_ND = x_ND.detach().float()
        rows = SMALL_BLOCK if dim <= SMALL_SIDE else BLOCK
        products = torch.empty(min(dim, rows) * dim)
        for start in range(0, dim, rows):
            stop = min(start + rows, dim)
            block = products[: (stop - start) * stop].view(stop - start, stop)
            torch.mm(x_ND[:, start:stop].T, x_ND[:, :stop], out=block)
            add_lower(sum_P.data_ptr(), block.data_ptr(), start, stop, scale, threads)
        if ones_column is not None:  # the bias row is the contiguous tail [column sums, N]
            tail = sum_P[packed_numel(dim) :]
            tail[:dim].add_(x_ND.sum(dim=0), alpha=scale)
            tail[dim].add_(ones_column.float().sum(), alpha=scale)
    return sum_P


def symmetric_pack_into_(out: Tensor, starts: Sequence[int], matrices_DD: Sequence[Tensor]) -> None:
    """See :func:`ds_kfac.ops.reference.symmetric_pack_into_`."""
    readable = all(x.dtype is torch.float32 and x.stride(-1) == 1 for x in matrices_DD)
    if out.dtype not in DTYPES or not out.is_contiguous() or not readable:
        raise NotMadeFor(f"symmetric_pack_into_: expected fp32 rows in one piece, got {of(*matrices_DD)} for {of(out)}")
    dims = [len(x_DD) for x_DD in matrices_DD]
    _check_layout("symmetric_pack_into_", out, starts, dims)
    if any(x_DD.shape != (dim, dim) for x_DD, dim in zip(matrices_DD, dims, strict=True)):
        raise ValueError(f"symmetric_pack_into_: expected square matrices, got {[tuple(x.shape) for x in matrices_DD]}")
    library().ds_kfac_pack(
        out.data_ptr(), DTYPES[out.dtype], len(dims), integers(starts), pointers(matrices_DD),
        integers([x_DD.stride(0) for x_DD in matrices_DD]), integers(dims), torch.get_num_threads(),
    )  # fmt: skip
    return None


def symmetric_unpack_from(
    packed: Tensor, starts: Sequence[int], dims: Sequence[int], *, mirror: bool = True
) -> list[Tensor]:
    """See :func:`ds_kfac.ops.reference.symmetric_unpack_from`."""
    if packed.dtype not in DTYPES or not packed.is_contiguous():
        raise NotMadeFor(f"symmetric_unpack_from: expected fp32, bf16 or fp16 in one piece, got {of(packed)}")
    _check_layout("symmetric_unpack_from", packed, starts, dims)
    matrices = [torch.empty(dim, dim) for dim in dims]
    library().ds_kfac_unpack(
        packed.data_ptr(), DTYPES[packed.dtype], len(dims), integers(starts), pointers(matrices), integers(dims),
        mirror, torch.get_num_threads(),
    )  # fmt: skip
    return matrices


def _check_layout(op: str, flat: Tensor, starts: Sequence[int], dims: Sequence[int]) -> None:
    for start, dim in zip(starts, dims, strict=True):
        if start < 0 or start + packed_numel(dim) > flat.numel():
            raise ValueError(f"{op}: a triangle of side {dim} at {start} is outside of {flat.numel()} elements")


def ema_update_(
    averages_P: Sequence[Tensor],
    sums_P: Sequence[Tensor],
    counts: Sequence[Tensor],
    updates: Sequence[Tensor],
    decays: Sequence[float],
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.ema_update_`."""
    if not plain(*averages_P, *sums_P, *counts, *updates):
        raise NotMadeFor(f"ema_update_: expected plain fp32 tensors, got {of(*averages_P, *sums_P)}")
    numels = [len(average) for average in averages_P]
    if numels != [len(sum_P) for sum_P in sums_P] or not len(numels) == len(counts) == len(updates) == len(decays):
        raise ValueError(f"ema_update_: averages of {numels} elements, sums of {[len(sum_P) for sum_P in sums_P]}")
    used = torch.zeros(len(numels), dtype=torch.bool)
    library().ds_kfac_ema_update(
        len(numels), pointers(averages_P), pointers(sums_P), integers(numels), pointers(counts),
        pointers(updates), (ctypes.c_float * len(decays))(*decays), used.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return used


def similarity(
    now_P: Sequence[Tensor],
    before_P: Sequence[Tensor | None],
    earlier_P: Sequence[Tensor | None],
    dims: Sequence[int],
    blocks: Sequence[int] | None = None,
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.similarity`."""
    known = [x for x in (*now_P, *before_P, *earlier_P) if x is not None]
    if not plain(*known):
        raise NotMadeFor(f"similarity: expected plain fp32 tensors, got {of(*known)}")
    blocks = dims if blocks is None else blocks
    for dim, block, *parts in zip(dims, blocks, now_P, before_P, earlier_P, strict=True):
        numel = blocks_numel(dim, block)
        if any(part is not None and part.numel() != numel for part in parts):
            raise ValueError(f"similarity: a side of {dim} in blocks of {block} has {numel} elements, got {of(*parts)}")
    norms = torch.empty(len(now_P), 3)
    library().ds_kfac_similarity(
        len(now_P), pointers(now_P), pointers(before_P), pointers(earlier_P), integers(dims), integers(blocks),
        norms.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return norms


def eigen_scale(
    x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Tensor | float, *, exponent: float = 1.0
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.eigen_scale`."""
    if x_OI.ndim == 2 and not x_OI.is_contiguous() and x_OI.T.is_contiguous():
        return eigen_scale_dot(x_OI.T, values_I, values_O, damping, exponent=exponent)[0].T
    return eigen_scale_dot(x_OI, values_O, values_I, damping, exponent=exponent)[0]


def eigen_scale_dot(
    x_OI: Tensor,
    values_O: Tensor,
    values_I: Tensor,
    damping: Tensor | float,
    *,
    exponent: float = 1.0,
    split: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`ds_kfac.ops.reference.eigen_scale_dot`."""
    if exponent not in (0.5, 1.0) or x_OI.shape != (len(values_O), len(values_I)) or x_OI.dtype != torch.float32:
        raise NotMadeFor(f"eigen_scale_dot: expected fp32 and exponent 1 or 1/2, got {of(x_OI)} and {exponent}")
    x_OI, values_O, values_I = x_OI.contiguous(), values_O.float().contiguous(), values_I.float().contiguous()
    rows, columns = x_OI.shape
    scaled_OI, dots = torch.empty(rows, columns), torch.empty(2)
    library().ds_kfac_eigen_scale_dot(
        x_OI.data_ptr(), scaled_OI.data_ptr(), rows, columns, values_O.data_ptr(), values_I.data_ptr(), float(damping),
        exponent == 0.5, _cut(split, columns), dots.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return scaled_OI, dots


def corrected_scale_dot(
    x_OI: Tensor,
    second_OI: Tensor,
    decay: Tensor | float,
    terms: Tensor | float,
    damping: Tensor | float,
    *,
    exponent: float = 1.0,
    split: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`ds_kfac.ops.reference.corrected_scale_dot`."""
    x_OI, second_OI = x_OI.contiguous(), second_OI.contiguous()
    fits = x_OI.ndim == 2 and x_OI.shape == second_OI.shape and plain(second_OI, x_OI)
    if exponent not in (0.5, 1.0) or not fits:
        raise NotMadeFor(f"corrected_scale_dot: expected plain fp32, got {of(x_OI, second_OI)}, exponent {exponent}")
    rows, columns = x_OI.shape
    scaled_OI, new_OI, dots = torch.empty(rows, columns), torch.empty(rows, columns), torch.empty(2)
    library().ds_kfac_corrected_scale_dot(
        x_OI.data_ptr(), scaled_OI.data_ptr(), rows, columns, second_OI.data_ptr(), new_OI.data_ptr(), float(decay),
        (1 - float(decay)) * float(terms), float(damping), exponent == 0.5, _cut(split, columns), dots.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return scaled_OI, new_OI, dots


def adam_scale(
    x_OI: Tensor,
    first_OI: Tensor,
    second_OI: Tensor,
    updates: Tensor,
    usable: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`ds_kfac.ops.reference.adam_scale`. All laid out like ``x_OI``; moments that are not are copied."""
    if not x_OI.shape == first_OI.shape == second_OI.shape:
        raise ValueError(f"adam_scale: moments do not fit x, got {of(x_OI, first_OI, second_OI)}")
    transposed = x_OI.ndim == 2 and not x_OI.is_contiguous() and x_OI.T.is_contiguous()
    given = [(part.T if transposed else part).contiguous() for part in (x_OI, first_OI, second_OI)]
    if x_OI.ndim != 2 or not plain(*given):
        raise NotMadeFor(f"adam_scale: expected fp32 matrices on the CPU, got {of(x_OI, first_OI, second_OI)}")
    found = [torch.empty(given[0].shape) for _ in given]
    library().ds_kfac_adam_scale(
        *(part.data_ptr() for part in (*given, *found)), x_OI.numel(), float(updates), bool(usable), *betas, eps,
        nesterov, torch.get_num_threads(),
    )  # fmt: skip
    direction_OI, new_first_OI, new_second_OI = (part.T if transposed else part for part in found)
    return direction_OI, new_first_OI, new_second_OI


def _cut(split: int | None, columns: int) -> int:
    return columns if split is None else min(max(split, 0), columns)
