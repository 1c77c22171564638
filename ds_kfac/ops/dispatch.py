"""The op vocabulary that the floors above call: each op by the backend chosen for the device of its tensors.

Contracts are in ``ops/reference.py``. Several matrices [n, O, I] at once go to plain torch whatever was chosen: that is
for small ones, of which the launches cost more than the passes over memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ds_kfac.ops import functional
from ds_kfac.ops.backends import chosen

__all__ = [
    "adam_scale",
    "block_syrk_accumulate_",
    "corrected_scale_dot",
    "count_accumulate_",
    "eigen_scale",
    "eigen_scale_dot",
    "ema_update_",
    "patch_syrk_accumulate_",
    "similarity",
    "symmetric_pack_into_",
    "symmetric_unpack_from",
    "syrk_accumulate_",
]


def syrk_accumulate_(
    sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None, scale: Tensor | float = 1.0
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.syrk_accumulate_`."""
    return chosen(sum_P.device.type).ops["syrk_accumulate_"][1](sum_P, x_ND, ones_column=ones_column, scale=scale)


def block_syrk_accumulate_(sum_P: Tensor, x_ND: Tensor, *, block: int, scale: Tensor | float = 1.0) -> Tensor:
    """See :func:`ds_kfac.ops.reference.block_syrk_accumulate_`."""
    return chosen(sum_P.device.type).ops["block_syrk_accumulate_"][1](sum_P, x_ND, block=block, scale=scale)


def count_accumulate_(sum_D: Tensor, index_N: Tensor) -> Tensor:
    """See :func:`ds_kfac.ops.reference.count_accumulate_`."""
    return chosen(sum_D.device.type).ops["count_accumulate_"][1](sum_D, index_N)


def patch_syrk_accumulate_(
    sum_P: Tensor,
    x_NCHW: Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    ones: bool = False,
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.patch_syrk_accumulate_`."""
    op = chosen(sum_P.device.type).ops["patch_syrk_accumulate_"][1]
    return op(sum_P, x_NCHW, kernel=kernel, stride=stride, padding=padding, dilation=dilation, ones=ones)


def symmetric_pack_into_(out: Tensor, starts: Sequence[int], matrices_DD: Sequence[Tensor]) -> None:
    """See :func:`ds_kfac.ops.reference.symmetric_pack_into_`."""
    chosen(out.device.type).ops["symmetric_pack_into_"][1](out, starts, matrices_DD)


def symmetric_unpack_from(
    packed: Tensor, starts: Sequence[int], dims: Sequence[int], *, mirror: bool = True
) -> list[Tensor]:
    """See :func:`ds_kfac.ops.reference.symmetric_unpack_from`."""
    return chosen(packed.device.type).ops["symmetric_unpack_from"][1](packed, starts, dims, mirror=mirror)


def ema_update_(
    averages_P: Sequence[Tensor],
    sums_P: Sequence[Tensor],
    counts: Sequence[Tensor],
    updates: Sequence[Tensor],
    decays: Sequence[float],
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.ema_update_`."""
    op = chosen(averages_P[0].device.type).ops["ema_update_"][1]
    return op(averages_P, sums_P, counts, updates, decays)


def similarity(
    now_P: Sequence[Tensor],
    before_P: Sequence[Tensor | None],
    earlier_P: Sequence[Tensor | None],
    dims: Sequence[int],
    blocks: Sequence[int] | None = None,
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.similarity`."""
    return chosen(now_P[0].device.type).ops["similarity"][1](now_P, before_P, earlier_P, dims, blocks)


def eigen_scale(
    x_OI: Tensor, values_O: Tensor, values_I: Tensor, damping: Tensor | float, *, exponent: float = 1.0
) -> Tensor:
    """See :func:`ds_kfac.ops.reference.eigen_scale`."""
    return _elementwise("eigen_scale", x_OI)(x_OI, values_O, values_I, damping, exponent=exponent)


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
    op = _elementwise("eigen_scale_dot", x_OI)
    return op(x_OI, values_O, values_I, damping, exponent=exponent, split=split)


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
    op = _elementwise("corrected_scale_dot", x_OI)
    return op(x_OI, second_OI, decay, terms, damping, exponent=exponent, split=split)


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
    """See :func:`ds_kfac.ops.reference.adam_scale`."""
    op = _elementwise("adam_scale", x_OI)
    return op(x_OI, first_OI, second_OI, updates, usable, betas=betas, eps=eps, nesterov=nesterov)


def _elementwise(op: str, x: Tensor) -> Callable[..., Any]:
    return getattr(functional, op) if x.ndim > 2 else chosen(x.device.type).ops[op][1]
