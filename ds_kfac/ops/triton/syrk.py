"""X^T X added to a packed fp32 triangle: lower tiles only, no [D, D] matrix, no pass to pack it.

Shape suffixes: N rows, D a factor's side, P = D(D+1)/2 a packed triangle.
"""

# mypy: disable-error-code="arg-type, call-arg, misc"
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ds_kfac.ops.guarded import NotMadeFor, of
from ds_kfac.ops.reference import packed_numel
from ds_kfac.ops.triton.base import DTYPES, architecture, check_devices, dot, multiprocessors, on_device_of, scalar
from ds_kfac.ops.triton.bias_row import add_bias_row
from ds_kfac.ops.triton.syrk_configs import SyrkConfig, config_for
from ds_kfac.ops.triton.syrk_descriptor import syrk_descriptor_kernel
from ds_kfac.ops.triton.triangle import add_tile, place_of, split_for, tile_count


@triton.jit(do_not_specialize=["rows", "tiles", "ones_stride"])
def syrk_kernel(
    sum_ptr, x_ptr, ones_ptr, scale, rows, dim, tail, x_stride, ones_stride, tiles,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ATOMIC: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """One tile a program along axis 0, one part of the rows along axis 1; then one column sum per tile column."""
    part = tl.cdiv(tl.cdiv(rows, tl.num_programs(1)), CHUNK) * CHUNK
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, rows)
    row = tl.arange(0, CHUNK)
    if tl.program_id(0) < tiles:
        first_row, first_column = place_of(tl.program_id(0), dim, BLOCK, WIDTH, GROUP)
        left_column = first_row + tl.arange(0, BLOCK)
        right_column = first_column + tl.arange(0, WIDTH)
        first = (start + row).to(tl.int64) * x_stride
        left_ptr = x_ptr + left_column[:, None] + first[None, :]  # X^T as it lies: no transpose
        right_ptr = x_ptr + first[:, None] + right_column[None, :]
        tile = tl.zeros((BLOCK, WIDTH), tl.float32)
        for begin in range(start, stop, CHUNK):
            inside = begin + row < stop
            left = tl.load(left_ptr, mask=(left_column < dim)[:, None] & inside[None, :], other=0.0)
            right = tl.load(right_ptr, mask=inside[:, None] & (right_column < dim)[None, :], other=0.0)
            tile = dot(left, right, tile)
            left_ptr += CHUNK * x_stride
            right_ptr += CHUNK * x_stride
        tile *= scalar(scale, SCALE_IN_MEMORY)
        add_tile(sum_ptr, tile, first_row, first_column, dim, ATOMIC)
    else:
        first_column = (tl.program_id(0) - tiles) * BLOCK
        add_bias_row(
            sum_ptr + tail, x_ptr, ones_ptr, scalar(scale, SCALE_IN_MEMORY), first_column, start, stop, dim,
            x_stride, ones_stride, BLOCK, CHUNK, ATOMIC,
        )  # fmt: skip


def syrk_accumulate_(
    sum_P: Tensor, x_ND: Tensor, *, ones_column: Tensor | None = None, scale: Tensor | float = 1.0
) -> Tensor:
    """sum_P += scale * pack(X^T X), X = [x_ND, ones_column]. See ``ops/reference.py``.

    Args:
        sum_P: fp32 [P] of side D, or D + 1 with ``ones_column``; contiguous, added to in place.
        x_ND: [N, D] in bf16 or fp16, multiplied on tensor cores, or fp32, which is not rounded and multiplied on
            fp32 units. Sums are in fp32. Copied if its columns are not contiguous.
        ones_column: [N, 1] in a floating dtype: the bias row of the triangle is [column sums of x, sum of ones].
        scale: a number, or a scalar on the device, which is not waited for.

    Cost: N D (D + block) FLOPs, about half of X^T X; 4 D (D + 1) bytes for the triangle. Deterministic if torch is
    set to be; small D then uses fewer multiprocessors.
    """
    (rows, dim), ones = x_ND.shape, ones_column is not None
    if sum_P.dtype != torch.float32 or sum_P.shape != (packed_numel(dim + ones),):
        raise ValueError(
            f"syrk_accumulate_: sum_P must be fp32 of shape ({packed_numel(dim + ones)},) for rows of "
            f"{dim}{' and a ones column' if ones else ''}, got {sum_P.dtype} {tuple(sum_P.shape)}"
        )
    if x_ND.dtype not in DTYPES or not sum_P.is_contiguous():
        raise NotMadeFor(
            f"syrk_accumulate_: expected rows in bf16, fp16 or fp32 and a contiguous sum, got {of(x_ND, sum_P)}"
        )
    check_devices("syrk_accumulate_", sum_P, x_ND, ones_column, scale)
    if not rows or not dim:
        return sum_P
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    accumulate(sum_P, x_ND, ones_column, config_for(x_ND, architecture()), scale)
    return sum_P


def accumulate(
    sum_P: Tensor, x_ND: Tensor, ones_column: Tensor | None, config: SyrkConfig, scale: Tensor | float = 1.0
) -> None:
    """:func:`syrk_accumulate_` of checked arguments, cut up as ``config`` says."""
    rows, dim = x_ND.shape
    tiles = tile_count(dim, config.block, config.width)
    split = split_for(tiles, triton.cdiv(rows, config.chunk), config.resident * multiprocessors(x_ND.device))
    programs = tiles + (triton.cdiv(dim, config.block) if ones_column is not None else 0)
    ones, ones_stride = (x_ND, 0) if ones_column is None else (ones_column, ones_column.stride(0))
    arguments = (x_ND, ones, scale, rows, dim, packed_numel(dim), x_ND.stride(0), ones_stride, tiles)
    options = {
        "BLOCK": config.block, "WIDTH": config.width, "CHUNK": config.chunk, "GROUP": config.group, "ATOMIC": split > 1,
        "SCALE_IN_MEMORY": isinstance(scale, Tensor), "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    with on_device_of(x_ND):
        if config.descriptor:
            left, right = (TensorDescriptor.from_tensor(x_ND, [config.chunk, n]) for n in (config.block, config.width))
            syrk_descriptor_kernel[(programs, split)](sum_P, left, right, *arguments, **options)
        else:
            syrk_kernel[(programs, split)](sum_P, *arguments, **options)
