"""Convolutions, whose rows are image patches (KFC, Grosse & Martens 2016, arXiv:1602.01407).

**nn.Conv1d, 2d, 3d**: the matrix is [O, C * kernel], with the bias as last column. Rows of A are
the input's patches, and rows of G are the gradients of output pixels. With groups there are
independent maps [groups, O / groups, C / groups * kernel], each with an A and a G. A is averaged
over examples and positions, and G is summed over positions. For a classifier this equals KFC's
Fisher.

**nn.ConvTranspose1d, 2d, 3d**: the weight is [C, O / groups, *kernel], and pixels and patches swap
roles. Rows of A are the input's pixels, and rows of G are the patches that the transposed
convolution sees in the output's gradient. The matrix is [O * kernel, C]; the bias is left to the
optimizer.

**Patches** have an entry for each channel and each position in the kernel, in the order of a
convolution's weight. A pixel is the patch of a kernel of size 1. Only a few patches are in memory
at a time.

**Grid.** An image has many positions, and neighbouring patches are similar. A grid takes every r-th
position along each of d dimensions, with an offset that changes with the training step. Every
position is equally likely to be taken. So r^d times the sum over a grid is an unbiased estimate of
the sum over all positions, for any r and image size, at 1/r^d of the cost.

Shape suffixes: N examples, C channels, R rows, D entries of a patch.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from operator import ge
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import Linear, computed_parameter, parameter_shape

CHUNK = 1 << 22
"""Largest number of patch elements that are in memory at a time."""
ROWS = 4
"""A grid takes at least ``ROWS`` times as many patches as the wider factor has rows."""
SPARSEST = 16
"""A grid takes at least one of every ``SPARSEST`` positions."""


def phase(turn: int, stride: int) -> int:
    """Return a pseudo-random number in 0 .. stride - 1. It is uniform and depends only on ``turn``.

    It uses splitmix64's finalizer (Steele et al. 2014), so regularly spaced values of ``turn`` also
    give all of these numbers.
    """
    z = (turn + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (z ^ z >> 31) % stride


def grid_step(rows: int, dims: int, width: int) -> int:
    """Return the largest ``step`` of a grid that still takes enough positions. Of the ``rows``
    positions in ``dims`` dimensions, it must take at least :data:`ROWS` times ``width``, and at
    least one of every :data:`SPARSEST`."""
    step = 1
    while (step + 1) ** dims <= SPARSEST and rows >= ROWS * width * (step + 1) ** dims:
        step += 1
    return step


class Grid(NamedTuple):
    """A grid of positions. Along every dimension it takes each ``step``-th position, starting at
    ``offset``."""

    step: int
    offset: tuple[int, ...]


class Patches:
    """The patches of images that a convolution sees.

    Args:
        image: [N, C, *S], in any memory format.
        seen_by: the convolution module; None: the patches are the pixels.

    Attributes:
        positions: number of positions of the kernel along each dimension.
        count: number of patches in all images.
    """

    def __init__(self, image: Tensor, seen_by: Any = None) -> None:
        size = image.shape[2:]
        dims = len(size)
        self.image = image
        self.mode = "zeros"
        self.kernel: tuple[int, ...] = (1,) * dims
        self.stride: tuple[int, ...] = (1,) * dims
        self.dilation: tuple[int, ...] = (1,) * dims
        # in the form of F.pad: (before, after) for each dimension, the last dimension first
        self.padding: tuple[int, ...] = (0,) * 2 * dims
        if seen_by is not None:
            self.mode = seen_by.padding_mode
            self.kernel = seen_by.kernel_size
            self.stride = seen_by.stride
            self.dilation = seen_by.dilation
            self.padding = tuple(seen_by._reversed_padding_repeated_twice)
        positions = []
        for dim in range(dims):
            before_and_after = 2 * (dims - 1 - dim)
            padded = size[dim] + sum(self.padding[before_and_after : before_and_after + 2])
            span = self.dilation[dim] * (self.kernel[dim] - 1)  # dilated length - 1
            positions.append((padded - span - 1) // self.stride[dim] + 1)
        self.positions = tuple(positions)
        self.count = len(image) * prod(self.positions)

    def padded(self, image: Tensor) -> Tensor:
        """Return images with the convolution's padding."""
        if not any(self.padding):
            return image
        return F.pad(image, self.padding, mode="constant" if self.mode == "zeros" else self.mode)

    def grid(self, turn: int | None, width: int) -> Grid:
        """Return a grid of positions.

        Args:
            turn: number of the training step, which decides the offset; None: every position.
            width: width of the layer's wider factor, see :func:`grid_step`.
        """
        dims = len(self.positions)
        if turn is None:
            return Grid(1, (0,) * dims)
        step = min(grid_step(self.count, dims, width), max(self.positions))
        number = phase(turn, step**dims)  # its digits in base ``step`` are the offset
        offset = []
        for _ in self.positions:
            number, digit = divmod(number, step)
            offset.append(digit)
        return Grid(step, tuple(offset))

    def add_to_(
        self,
        sum_P: Tensor,
        side: Side,
        grid: Grid,
        *,
        bias: bool = False,
        gain: Tensor | float = 1.0,
        kept: Tensor | None = None,
    ) -> None:
        """Add the sum of x x^T over all patches x to a packed sum, in place. The sum over all
        patches is estimated from the patches of a grid.

        Args:
            sum_P: the packed sum.
            side: the side of the layer that the sum belongs to.
            grid: which patches are taken.
            bias: whether a 1 is appended to each patch. With channel groups, it is appended to each
                group's part of a patch.
            gain: factor by which the patches are multiplied.
            kept: bool scalar, whether the patches count; None: they count.
        """
        for rows_RD in self.rows(grid):
            scale: Tensor | float = grid.step ** len(grid.offset)
            if rows_RD.dtype in (torch.bfloat16, torch.float16):
                # applied after the product, so that 16-bit rows are not rounded again
                scale = gain**2 * scale
            elif isinstance(gain, float) and gain == 1.0:
                rows_RD = rows_RD.float()
            else:
                rows_RD = rows_RD.float() * gain
            counted = None if kept is None else kept.expand(len(rows_RD))
            side.accumulate_(sum_P, rows_RD, kept=counted, bias=bias, scale=scale)

    def _counts(self, grid: Grid) -> list[int]:
        """Return the number of the grid's positions along each dimension."""
        return [
            -(-(size - start) // grid.step)
            for size, start in zip(self.positions, grid.offset, strict=True)
        ]

    def rows(self, grid: Grid) -> Iterator[Tensor]:
        """Yield the patches of a grid in several tensors [R, D]."""
        counts = self._counts(grid)
        width = self.image.shape[1] * prod(self.kernel)
        # number of elements in one example's patches at one position along the first dimension
        line = prod(counts[1:]) * width
        if not len(self.image) or min(counts) <= 0:
            return
        for image in self.image.split(max(1, CHUNK // (counts[0] * line))):
            view = self._view(image, grid)
            for part in view.split(max(1, CHUNK // (len(image) * line)), dim=1):
                yield part.reshape(-1, width)

    def all_rows(self) -> Tensor:
        """Return a copy of all patches, [N, positions, D]."""
        return self._view(self.image).flatten(1, len(self.positions)).flatten(2)

    def sums(self) -> Tensor:
        """Return the sum of each example's patches, fp32 [N, D]."""
        view = self._view(self.image)
        taps = []  # for each place in the kernel, the sums [N, C]
        for place in product(*map(range, self.kernel)):
            tap = view
            for index in reversed(place):
                tap = tap[..., index]
            taps.append(tap.flatten(1, -2).sum(dim=1, dtype=torch.float32))
        return torch.stack(taps, dim=-1).flatten(1)

    def times(self, w_nDK: Tensor) -> Tensor:
        """Return the products of all patches with w, for n groups of channels, fp32
        [N, positions, n K]. They are computed as a convolution with K filters for each group."""
        n, D, K = w_nDK.shape
        filters = w_nDK.mT.reshape(n * K, D // prod(self.kernel), *self.kernel)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        many = max(1, CHUNK // max(1, self.image[:1].numel()))
        with torch.autocast(w_nDK.device.type, enabled=False):
            parts = [
                convolve(
                    self.padded(image).float(),
                    filters,
                    stride=self.stride,
                    dilation=self.dilation,
                    groups=n,
                )
                for image in self.image.split(many)
            ]
        return torch.cat(parts).flatten(2).mT

    def _view(self, image: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the patches of a grid as a view [N, *positions, C, *kernel] of the padded images;
        without a grid, all patches."""
        padded = self.padded(image)
        grid = grid or self.grid(None, 1)
        image_stride, channel_stride, *pixel_strides = padded.stride()
        dims = range(len(pixel_strides))
        # strides from one position of the kernel to the next, and from one kernel entry to the next
        moves = [self.stride[dim] * pixel_strides[dim] for dim in dims]
        taps = [self.dilation[dim] * pixel_strides[dim] for dim in dims]
        start = padded.storage_offset() + sum(grid.offset[dim] * moves[dim] for dim in dims)
        return padded.as_strided(
            (len(padded), *self._counts(grid), padded.shape[1], *self.kernel),
            (image_stride, *(grid.step * move for move in moves), channel_stride, *taps),
            start,
        )


FEW_CHANNELS = 4
"""A convolution with at most this many input channels is assumed to read an image, because an image
has three colours and may have transparency."""


class Convolution(Linear):
    """nn.Conv1d, 2d or 3d, as ``kind`` says."""

    images = True

    def __init__(self, kind: type[nn.modules.conv._ConvNd]) -> None:
        self.kind = kind
        self.dims = int(kind.__name__[-2])

    def batched(self, x: Tensor) -> Tensor:
        """Return a convolution's input or output as [N, C, *S]. For [C, *S], N is 1."""
        return x if x.ndim > self.dims + 1 else x.unsqueeze(0)

    def refusal(self, module: nn.Module) -> str | None:
        return computed_parameter(module)

    def overridden(self, module: nn.Module) -> str | None:
        """Return "forward" or "_conv_forward" if a module overrides this method of torch's class,
        else None. The patches of a module that overrides a method are unknown."""
        for name in ("forward", "_conv_forward"):
            if getattr(type(module), name, None) is not getattr(self.kind, name, None):
                return name
        return None

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        outputs, channels, *kernel = parameter_shape(module.weight)
        return channels * torch.Size(kernel).numel() + bias, outputs // module.groups

    def keeps_direction(self, module: Any) -> str | None:
        in_group = module.in_channels // module.groups
        out_group = module.out_channels // module.groups
        if module.groups > 1 and 1 in (in_group, out_group):
            return "the filter of a single channel is not a matrix"
        if module.in_channels <= FEW_CHANNELS:
            return f"its input has {module.in_channels} channels, as an image has"
        return None

    def rows(self, x: Tensor, output: Tensor) -> int:
        return output.numel() // max(1, self.batched(output).shape[1])

    def input_patches(self, module: Any, x: Tensor) -> Patches:
        """Return the patches whose second moment is A."""
        return Patches(self.batched(x), module)

    def gradient_patches(self, module: Any, gradient: Tensor) -> Patches:
        """Return the patches whose second moment is G."""
        return Patches(self.batched(gradient))

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> Tensor:
        return self.gradient_patches(module, gradient).sums()


class TransposedConvolution(Convolution):
    """nn.ConvTranspose1d, 2d or 3d, as ``kind`` says. Its patches are the patches of the
    convolution that it transposes."""

    transposed = True
    without_bias: str | None = (
        "is added to every output pixel, so it belongs to no column of the matrix"
    )

    def refusal(self, module: Any) -> str | None:
        reason = super().refusal(module)
        if reason is not None:
            return reason
        name = self.overridden(module)
        if name is not None:
            return (
                f"{type(module).__name__} overrides {self.kind.__name__}.{name}, so its patches "
                "are unknown"
            )
        if any(map(ge, module.output_padding, module.stride)):
            return "its output_padding is not below its stride"
        return None

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        channels, outputs, *kernel = parameter_shape(module.weight)
        return channels // module.groups, outputs * torch.Size(kernel).numel()

    def rows(self, x: Tensor, output: Tensor) -> int:
        return x.numel() // max(1, self.batched(x).shape[1])

    def input_patches(self, module: Any, x: Tensor) -> Patches:
        return super().gradient_patches(module, x)

    def gradient_patches(self, module: Any, gradient: Tensor) -> Patches:
        return super().input_patches(module, gradient)
