"""Second moments of image patches, of which only a few are in memory at a time.

A window looks at an image [N, C, *S] from every position; a patch has an entry for each channel and place of its
kernel, in the order of a convolution's weight. Single pixels are patches too.

**Grid.** Positions are many, and neighbours nearly alike. A grid takes one in r along each of d dimensions, from a
place that moves with the step: every position is as likely as any other, so r^d times the sum is unbiased, whatever r
and the sizes. It is chosen before anything is copied, and costs r^d times less.

Shape suffixes: N examples, C channels, R rows, D entries of a patch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.curvature.side import Side
from ds_kfac.model.rows import RowRule, phase

CHUNK = 1 << 22
"""Elements of patches that exist at once."""
ROWS = 4
"""Rows that a grid leaves for each row of the wider factor, at least."""
SPARSEST = 16
"""Positions of which a grid takes one, at most."""


@dataclass(frozen=True)
class Window:
    """How a convolution looks at its input. One number per dimension, but padding as for ``F.pad``."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    mode: str = "zeros"

    @classmethod
    def of(cls, module: nn.modules.conv._ConvNd) -> "Window":
        """A convolution's; of a transposed one that of the convolution it is the transpose of."""
        padding = tuple(module._reversed_padding_repeated_twice)
        return cls(module.kernel_size, module.stride, module.dilation, padding, module.padding_mode)

    @classmethod
    def pixel(cls, dims: int) -> "Window":
        """Sees one place."""
        one = (1,) * dims
        return cls(one, one, one, (0,) * 2 * dims)

    def padded(self, image: Tensor) -> Tensor:
        """As the module pads it."""
        if not any(self.padding):
            return image
        return F.pad(image, self.padding, mode="constant" if self.mode == "zeros" else self.mode)

    def positions(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """From how many places it sees an image of ``size``."""
        pads = [sum(self.padding[2 * d : 2 * d + 2]) for d in reversed(range(len(size)))]
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        return tuple((s + p - w - 1) // t + 1 for s, p, w, t in zip(size, pads, spans, self.stride, strict=True))


def grid_step(rule: RowRule, rows: int, dims: int, width: int) -> int:
    """The largest that leaves :data:`ROWS` times ``width`` of so many rows, but not fewer than one in
    :data:`SPARSEST`; or the smallest that leaves at most ``rule.sample``."""
    step = 1
    if rule.sample is not None:
        while rows > rule.sample * step**dims:
            step += 1
    elif rule.positions:
        while (step + 1) ** dims <= SPARSEST and rows >= ROWS * width * (step + 1) ** dims:
            step += 1
    return step


@dataclass(frozen=True)
class Grid:
    """One position in ``step`` along every dimension, from ``offset`` on."""

    step: int
    offset: tuple[int, ...]

    @property
    def scale(self) -> int:
        """Times the sum over the grid is, on average over the offsets, the sum over all positions."""
        return self.step ** len(self.offset)

    @classmethod
    def choose(cls, rule: RowRule, turn: int, examples: int, positions: tuple[int, ...], width: int) -> "Grid":
        """See :func:`grid_step`; its offset is that of the step ``turn``."""
        dims = len(positions)
        step = min(grid_step(rule, examples * prod(positions), dims, width), max(positions))
        place, offset = phase(turn, step**dims), []
        for _ in positions:
            place, digit = divmod(place, step)
            offset.append(digit)
        return cls(step, tuple(offset))


@dataclass(frozen=True)
class Patches:
    """Of a batch of images.

    Attributes:
        image: [N, C, *S] in any memory format.
        positions: from which the window sees it, along every dimension.
    """

    image: Tensor
    window: Window
    positions: tuple[int, ...]

    @property
    def examples(self) -> int:
        return len(self.image)

    @property
    def count(self) -> int:
        return self.examples * prod(self.positions)

    def grid(self, rule: RowRule, turn: int, width: int) -> Grid:
        """See :meth:`Grid.choose`."""
        return Grid.choose(rule, turn, self.examples, self.positions, width)

    def add_to_(
        self,
        sum_P: Tensor,
        side: Side,
        grid: Grid,
        *,
        bias: bool = False,
        gain: Tensor | float = 1.0,
    ) -> None:
        """Add the second moment of ``gain`` times all patches to a packed sum of ``side``.

        Args:
            bias: whether every patch, of every group of channels, ends with a 1.
        """
        for rows_RD in self.rows(grid):
            scale: Tensor | float = grid.scale
            if rows_RD.dtype in (torch.bfloat16, torch.float16):
                scale = gain**2 * grid.scale  # they are multiplied as they are
            else:
                rows_RD = rows_RD.float() if isinstance(gain, float) and gain == 1.0 else rows_RD.float() * gain
            ones = rows_RD.new_ones(len(rows_RD), 1) if bias else None
            side.accumulate_(sum_P, rows_RD, ones_column=ones, scale=scale)

    def rows(self, grid: Grid) -> Iterator[Tensor]:
        """The patches of a grid, [R, D] a time."""
        counts = [-(-(size - start) // grid.step) for size, start in zip(self.positions, grid.offset, strict=True)]
        width = self.image.shape[1] * prod(self.window.kernel)
        line = prod(counts[1:]) * width  # of one example, along the first dimension
        if not len(self.image) or min(counts) <= 0:
            return
        for image in self.image.split(max(1, CHUNK // (counts[0] * line))):
            view = self._view(self.window.padded(image), counts, grid)
            for part in view.split(max(1, CHUNK // (len(image) * line)), dim=1):
                yield part.reshape(-1, width)

    def sums(self) -> Tensor:
        """Of every example's patches, fp32 [N, D]."""
        padded, taps = self.window.padded(self.image), []
        every = Grid(1, (0,) * len(self.positions))
        view = self._view(padded, list(self.positions), every)
        for place in product(*map(range, self.window.kernel)):
            tap = view
            for index in reversed(place):
                tap = tap[..., index]
            taps.append(tap.flatten(1, -2).sum(dim=1, dtype=torch.float32))
        return torch.stack(taps, dim=-1).flatten(1)

    def _view(self, padded: Tensor, counts: list[int], grid: Grid) -> Tensor:
        """[N, *positions, C, *kernel] without a copy."""
        N, C, *places = padded.stride()
        moves = [stride * place for stride, place in zip(self.window.stride, places, strict=True)]
        taps = [dilation * place for dilation, place in zip(self.window.dilation, places, strict=True)]
        start = padded.storage_offset() + sum(at * move for at, move in zip(grid.offset, moves, strict=True))
        return padded.as_strided(
            (len(padded), *counts, padded.shape[1], *self.window.kernel),
            (N, *(grid.step * move for move in moves), C, *taps),
            start,
        )
