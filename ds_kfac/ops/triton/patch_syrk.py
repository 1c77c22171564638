"""Second moment of convolution patches into a packed triangle; no patch is ever written to memory.

Shape suffixes: N examples, C channels, H, W height and width; P = D(D+1)/2 a packed triangle.
"""

# mypy: disable-error-code="arg-type, call-arg, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kfac.ops.guarded import NotMadeFor, of
from ds_kfac.ops.reference import packed_numel
from ds_kfac.ops.triton.base import DTYPES, INTERPRET, check_devices, dot, multiprocessors, on_device_of
from ds_kfac.ops.triton.syrk_configs import SyrkConfig
from ds_kfac.ops.triton.triangle import add_tile, add_to, split_for, tile_at, tile_count


def patch_config() -> SyrkConfig:
    """One for all dtypes: addresses of single elements take the registers that a larger tile would need."""
    return SyrkConfig(32, 16, 4, 1, 1) if INTERPRET else SyrkConfig(64, 32, 8, 1, 1)


@triton.jit
def _feature(index, kernel_h, kernel_w, dilation_h, dilation_w, stride_c, stride_h, stride_w):
    """Of features (channel, i, j): the shifts i and j, and the offset of the element."""
    channel, within = index // (kernel_h * kernel_w), index % (kernel_h * kernel_w)
    down, right = within // kernel_w * dilation_h, within % kernel_w * dilation_w
    return down, right, channel.to(tl.int64) * stride_c + down.to(tl.int64) * stride_h + right.to(tl.int64) * stride_w


@triton.jit
def _place(
    index, out_h, out_w, step_h, step_w, padding_h, padding_w, stride_n, stride_h, stride_w
):  # fmt: skip
    """Of patches (example, row, column): the first element's row and column in the image, and its offset."""
    example, within = index // (out_h * out_w), index % (out_h * out_w)
    top = within // out_w * step_h - padding_h
    left = within % out_w * step_w - padding_w
    return top, left, example.to(tl.int64) * stride_n + top.to(tl.int64) * stride_h + left.to(tl.int64) * stride_w


@triton.jit
def _gather(x_ptr, down, right, shift, known, top, left, offset, counts, height, width):
    """[features, patches]; zero in the padding. Neighbouring patches are neighbours in memory."""
    image_row = down[:, None] + top[None, :]
    image_column = right[:, None] + left[None, :]
    inside = (image_row >= 0) & (image_row < height) & (image_column >= 0) & (image_column < width)
    inside = inside & known[:, None] & counts[None, :]
    return tl.load(x_ptr + shift[:, None] + offset[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "tiles", "dim", "out_h", "out_w", "height", "width"])
def patch_syrk_kernel(
    sum_ptr, x_ptr, rows, dim, tail, tiles, height, width, out_h, out_w, kernel_h, kernel_w, step_h, step_w,
    padding_h, padding_w, dilation_h, dilation_w, stride_n, stride_c, stride_h, stride_w,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """As ``syrk_kernel``, with rows that are gathered."""
    part = tl.cdiv(tl.cdiv(rows, tl.num_programs(1)), CHUNK) * CHUNK
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, rows)
    if tl.program_id(0) < tiles:
        tile_row, tile_column = tile_at(tl.program_id(0))
        feature_1 = tile_row * BLOCK + tl.arange(0, BLOCK)
        feature_2 = tile_column * BLOCK + tl.arange(0, BLOCK)
        down_1, right_1, shift_1 = _feature(
            feature_1, kernel_h, kernel_w, dilation_h, dilation_w, stride_c, stride_h, stride_w
        )
        down_2, right_2, shift_2 = _feature(
            feature_2, kernel_h, kernel_w, dilation_h, dilation_w, stride_c, stride_h, stride_w
        )
        tile = tl.zeros((BLOCK, BLOCK), tl.float32)
        for begin in range(start, stop, CHUNK):
            patch = begin + tl.arange(0, CHUNK)
            top, left, offset = _place(
                patch, out_h, out_w, step_h, step_w, padding_h, padding_w, stride_n, stride_h, stride_w
            )
            counts = patch < stop
            x_1 = _gather(x_ptr, down_1, right_1, shift_1, feature_1 < dim, top, left, offset, counts, height, width)
            x_2 = _gather(x_ptr, down_2, right_2, shift_2, feature_2 < dim, top, left, offset, counts, height, width)
            tile = dot(x_1, tl.trans(x_2), tile)
        add_tile(sum_ptr, tile, tile_row * BLOCK, tile_column * BLOCK, dim, ATOMIC)
    else:
        first = (tl.program_id(0) - tiles) * BLOCK
        feature = first + tl.arange(0, BLOCK)
        down, right, shift = _feature(feature, kernel_h, kernel_w, dilation_h, dilation_w, stride_c, stride_h, stride_w)
        total = tl.zeros((BLOCK,), tl.float32)
        for begin in range(start, stop, CHUNK):
            patch = begin + tl.arange(0, CHUNK)
            top, left, offset = _place(
                patch, out_h, out_w, step_h, step_w, padding_h, padding_w, stride_n, stride_h, stride_w
            )
            x = _gather(x_ptr, down, right, shift, feature < dim, top, left, offset, patch < stop, height, width)
            total += tl.sum(x.to(tl.float32), axis=1)
        add_to(sum_ptr + tail + feature, total, feature < dim, ATOMIC)
        count = tl.maximum(stop - start, 0).to(tl.float32)  # a last part may be empty
        add_to(sum_ptr + tail + dim, count, first == 0, ATOMIC)


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
    """sum_P += pack(X^T X) for X = unfold(x), patches of all examples as rows, with a column of ones if asked for.

    Args:
        sum_P: fp32 [P] of side D = C kernel_h kernel_w, plus 1 with ``ones``; contiguous, added to in place. Features
            are ordered (channel, i, j), as in a convolution's weight and ``torch.nn.functional.unfold``.
        x_NCHW: bf16, fp16 or fp32, not rounded. Any strides; fastest where W is contiguous.

    Cost: R D (D + block) FLOPs for R patches. Reads come from x and the caches, im2col's 2 R D elements are not moved.
    """
    examples, channels, height, width = x_NCHW.shape
    out_h, out_w = (
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, pad, spread, taps, step in zip((height, width), padding, dilation, kernel, stride, strict=True)
    )
    dim, rows = channels * kernel[0] * kernel[1], examples * max(out_h, 0) * max(out_w, 0)
    if sum_P.dtype != torch.float32 or sum_P.shape != (packed_numel(dim + ones),):
        raise ValueError(
            f"patch_syrk_accumulate_: sum_P must be fp32 of shape ({packed_numel(dim + ones)},) for "
            f"patches of {dim}{' and ones' if ones else ''}, got {sum_P.dtype} {tuple(sum_P.shape)}"
        )
    if x_NCHW.dtype not in DTYPES or not sum_P.is_contiguous():
        raise NotMadeFor(
            f"patch_syrk_accumulate_: expected bf16, fp16 or fp32 and a contiguous sum, got {of(x_NCHW, sum_P)}"
        )
    check_devices("patch_syrk_accumulate_", sum_P, x_NCHW)
    if not rows or not dim:
        return sum_P
    config = patch_config()
    tiles = tile_count(dim, config.block)
    split = split_for(tiles, triton.cdiv(rows, config.chunk), config.resident * multiprocessors(x_NCHW.device))
    programs = tiles + (triton.cdiv(dim, config.block) if ones else 0)
    with on_device_of(x_NCHW):
        patch_syrk_kernel[(programs, split)](
            sum_P, x_NCHW, rows, dim, packed_numel(dim), tiles, height, width, out_h, out_w,
            *kernel, *stride, *padding, *dilation, *x_NCHW.stride(),
            BLOCK=config.block, CHUNK=config.chunk, ATOMIC=split > 1,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return sum_P
