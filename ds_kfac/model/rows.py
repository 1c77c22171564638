"""A call's tensors -> the rows whose second moments are A and G, and the sums of these
(docs/explanation/capture.md).

Shape suffixes: N examples, T positions that share the weight, D a side's width, R rows, P a packed
triangle.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.calls import Call
from ds_kfac.model.convolutions import Convolution, Grid, Patches, phase
from ds_kfac.model.layers import LayerType

ROWS, PASSES, TERMS = range(3)
"""Entries of :attr:`BatchSum.counts`."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Taken:
    """One row in ``stride``, from ``offset`` on, each of which stands for so many."""

    stride: int = 1
    offset: int = 0

    def of(self, rows: Tensor) -> Tensor:
        """A view of some rows [R, ..]."""
        return rows if self.stride == 1 else rows[self.offset :: self.stride]


EACH = Taken()


@dataclass(eq=False)
class BatchSum:
    """A step's sum of outer products of one factor's rows, added to in place.

    Attributes:
        sum_P: fp32, packed.
        counts: fp32 [3]: the number of rows; on this rank the number of backward passes, K, and the
            sum of their R_p.
        ranks: from how many ranks the rows are.
    """

    sum_P: Tensor
    counts: Tensor
    ranks: int = 1

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> "BatchSum":
        sum_P = torch.zeros(numel, device=device, dtype=torch.float32)
        return cls(sum_P, torch.zeros(TERMS + 1, device=device, dtype=torch.float32))

    def add_(self, other: "BatchSum") -> None:
        self.sum_P.add_(other.sum_P)
        self.counts.add_(other.counts)


def is_nonzero(rows: Tensor) -> Tensor:
    """Whether a row [.., D] has an entry that is not zero, bool [..]; NaN is not zero."""
    if rows.shape[-1] == 0:
        return rows.new_zeros(rows.shape[:-1], dtype=torch.bool)
    return rows.abs().amax(dim=-1) != 0  # of ways to see it the fastest on a CPU


def have_gradient(kind: LayerType, gradient: Tensor) -> Tensor:
    """Which rows [.., O] of an output gradient are not zero, bool [..]; of images which entries."""
    return gradient != 0 if kind.images else is_nonzero(gradient)


def kept_rows(x: Tensor, with_gradient: Tensor, mask: Tensor | None) -> Tensor:
    """Which rows of a call count, bool of its leading shape.

    A row is left out if its gradient is zero and the mask leaves it out, or if its input and its
    gradient are both zero. A call whose gradient is zero in every entry has no row.

    Args:
        x: rows of inputs [.., I].
        with_gradient: bool [..], whether a row's output gradient is not zero.
        mask: bool [..], False for padding; None: no mask fits.
    """
    others = is_nonzero(x).reshape(with_gradient.shape)
    if mask is not None:
        others = others & mask
    return with_gradient | (others & with_gradient.any())


def by_example(rows: Tensor) -> Tensor:
    """[N, .., D] -> [N, T, D]; without positions T is 1. [D] is one example."""
    if rows.ndim < 3:
        return rows.unsqueeze(-2) if rows.ndim == 2 else rows[None, None]
    return rows.flatten(1, -2)


class RowSums:
    """Adds rows to sums.

    Args:
        weight_sharing: "expand": every position is a row (a loss per token). "reduce": every
            example is one, the mean of its inputs and the sum of its output gradients (a loss per
            sequence or image). Eschenhagen et al. 2023 (arXiv:2311.00636).
        positions: whether convolutions take a sub-sample of positions, see ``convolutions.py``.
        stage: context in which rows are added, for timings.

    Attributes:
        turn: the step, which decides which rows a sub-sample has.
    """

    def __init__(
        self,
        weight_sharing: str = "expand",
        positions: bool = True,
        stage: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.weight_sharing = weight_sharing
        self.positions = positions
        self.turn = 0
        self._stage = stage

    @torch.no_grad()
    def add_inputs(
        self,
        call: Call,
        x: Tensor,
        kept: Tensor,
        alive: Tensor,
        batch: BatchSum,
        *,
        stride: int = 1,
    ) -> None:
        """Add a call's inputs to a sum of A.

        Args:
            x: rows [.., I], or images.
            kept: bool of the leading shape of rows, which of them count.
            alive: bool scalar, whether any counts.
            stride: of how many rows one is taken.
        """
        layer, kind, bias = call.layer, call.kind, call.layer.bias is not None
        with self._stage():
            if isinstance(kind, Convolution):
                patches = kind.input_patches(call.module, x)
                if self.weight_sharing == "expand":
                    patches.add_to_(
                        batch.sum_P, layer.A, self._grid(patches, call), bias=bias, kept=alive
                    )
                    batch.counts[ROWS].add_(patches.count * alive)
                    return
                # the mean of each example
                rows = patches.sums() * (len(patches.image) / max(1, patches.count))
                kept, taken = alive.expand(len(rows)), EACH
            elif self.weight_sharing == "reduce":
                x_NTD = by_example(x)
                kept_NT1 = kept.reshape(*x_NTD.shape[:2], 1)
                counts_N1 = kept_NT1.sum(dim=1)
                rows = torch.where(kept_NT1, x_NTD.float(), 0.0).sum(dim=1) / counts_N1.clamp(min=1)
                kept, taken = counts_N1.reshape(-1) > 0, EACH
            else:
                taken = self._taken(stride, kept.numel())
                rows = taken.of(x.reshape(-1, x.shape[-1]))
                kept = taken.of(kept.reshape(-1))
            scale: Tensor | float = taken.stride * call.share
            batch.counts[ROWS].add_(kept.sum() * scale)
            if call.mask is None and not bias and not kind.images:
                # other rows are zero, unless none counts; so the kernel need not look at each row
                layer.A.accumulate_(batch.sum_P, rows, scale=alive * scale)
            else:
                layer.A.accumulate_(batch.sum_P, rows, kept=kept, bias=bias, scale=scale)

    @torch.no_grad()
    def add_gradients(
        self,
        call: Call,
        x: Tensor | None,
        gradient: Tensor,
        alive: Tensor,
        batch: BatchSum,
        scale: Tensor | float,
        *,
        stride: int = 1,
    ) -> None:
        """Add a call's output gradients, divided by ``scale``, to a sum of G, or of A where that is
        made of them.

        fp32 rows are divided before the product: the square of a gradient scaled by 2^16 may
        overflow. Rows in 16 bits go as they are, and the square of ``scale`` comes after: fp16
        squares stay below 2^32, and bf16 is not scaled.

        Args:
            x: the call's input, for kinds whose rows are made of both.
            gradient: rows [.., O], or images.
            alive: bool scalar, whether the gradient is not zero in every entry; else the call has
                no rows.
            stride: of how many rows one is taken.
        """
        layer, kind = call.layer, call.kind
        with self._stage():
            if self.weight_sharing == "expand" and isinstance(kind, Convolution):
                patches = kind.gradient_patches(call.module, gradient)
                patches.add_to_(batch.sum_P, layer.G, self._grid(patches, call), gain=1.0 / scale)
                batch.counts[ROWS].add_(patches.count * alive)
                return
            rows = kind.gradient_rows(call.module, x, gradient)
            if self.weight_sharing == "reduce":
                rows, taken = by_example(rows).sum(dim=1, dtype=torch.float32), EACH
            else:
                rows = rows.reshape(-1, rows.shape[-1])
                # pixels have a grid, and a norm's rows cost no product
                has_grid = kind.images or kind.needs_gradients
                taken = EACH if has_grid else self._taken(stride, len(rows))
                rows = taken.of(rows)
            factor: Tensor | float = float(taken.stride)
            if rows.dtype in HALVES:
                factor = factor / scale**2
            else:
                is_unscaled = isinstance(scale, float) and scale == 1.0
                rows = rows.float() if is_unscaled else rows.float() / scale
            side = layer.A if kind.needs_gradients else layer.G
            side.accumulate_(batch.sum_P, rows, scale=factor)
            batch.counts[ROWS].add_(len(rows) * taken.stride * alive)

    def _taken(self, stride: int, rows: int) -> Taken:
        """One row in ``stride``, from a place that moves with the step, so that every row is as
        likely to be met."""
        stride = min(stride, rows)
        return EACH if stride <= 1 else Taken(stride, phase(self.turn, stride))

    def _grid(self, patches: Patches, call: Call) -> Grid:
        """The same for both sides."""
        return patches.grid(self.turn if self.positions else None, max(call.layer.shape[-2:]))


def pairs(call: Call, x: Tensor, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """A call's inputs [N, T, I], each with the 1 of a bias, and its output gradients [N, T, O],
    fp32, zero where a row does not count. Of a convolution its patches.

    Args:
        x, gradient, kept: as in :meth:`RowSums.add_inputs`.
    """
    kind: Any = call.kind
    if isinstance(kind, Convolution):
        x = kind.input_patches(call.module, x).all_rows()
        gradient = kind.gradient_patches(call.module, gradient).all_rows()
        kept = kept.expand(x.shape[:-1])
    else:
        gradient = kind.gradient_rows(call.module, x, gradient)
    x_NTI, g_NTO = by_example(x).float(), by_example(gradient).float()
    if call.layer.bias is not None:
        x_NTI = torch.cat([x_NTI, torch.ones_like(x_NTI[..., :1])], dim=-1)
    return torch.where(kept.reshape(*x_NTI.shape[:2], 1), x_NTI, 0.0), g_NTO
