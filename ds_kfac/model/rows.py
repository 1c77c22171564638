"""Turn a call's tensors into the rows whose second moments are A and G, and add up the second
moments.

docs/explanation/capture.md says which rows count.

Shape suffixes: N examples, T positions that share the weight, I inputs, O outputs, D inputs or
outputs, R rows, P elements of a packed triangle.
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
"""Indices of the entries of :attr:`BatchSum.counts`."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sample:
    """A sub-sample of rows: one of every ``stride`` rows, from ``offset`` on. Each row of the
    sample counts ``stride`` times."""

    stride: int = 1
    offset: int = 0

    def of(self, rows: Tensor) -> Tensor:
        """Return a view of the rows of the sample, given all rows [R, ..]."""
        return rows if self.stride == 1 else rows[self.offset :: self.stride]


EVERY_ROW = Sample()


@dataclass(eq=False)
class BatchSum:
    """A step's sum of outer products of one factor's rows. Calls add to it in place.

    Attributes:
        sum_P: fp32, the packed triangle of the sum.
        counts: fp32 [3], indexed by :data:`ROWS`, :data:`PASSES` and :data:`TERMS`: the number of
            rows, this rank's number K of backward passes, and the sum of R_p over these passes.
        ranks: number of ranks whose rows are in the sum.
    """

    sum_P: Tensor
    counts: Tensor
    ranks: int = 1

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> "BatchSum":
        """Return a sum without rows, of ``numel`` packed elements."""
        sum_P = torch.zeros(numel, device=device, dtype=torch.float32)
        counts = torch.zeros(3, device=device, dtype=torch.float32)
        return cls(sum_P, counts)

    def add_(self, other: "BatchSum") -> None:
        """Add another sum to this one. Both must be sums over the same ranks."""
        self.sum_P.add_(other.sum_P)
        self.counts.add_(other.counts)


def is_nonzero(rows: Tensor) -> Tensor:
    """Return which rows [.., D] have a nonzero entry, as a bool tensor [..]. NaN counts as
    nonzero."""
    if rows.shape[-1] == 0:
        return rows.new_zeros(rows.shape[:-1], dtype=torch.bool)
    return rows.abs().amax(dim=-1) != 0  # the fastest way on a CPU


def have_gradient(layer_type: LayerType, gradient: Tensor) -> Tensor:
    """Return which rows [.., O] of an output gradient have a nonzero entry, as a bool tensor [..].
    For images, return which entries are nonzero."""
    return gradient != 0 if layer_type.images else is_nonzero(gradient)


def kept_rows(x: Tensor, with_gradient: Tensor, mask: Tensor | None) -> Tensor:
    """Return which rows of a call count, as a bool tensor of the call's leading shape.

    A row does not count if its gradient is zero and the mask marks it as padding, or if its input
    and its gradient are both zero. If the whole gradient of a call is zero, none of the call's rows
    counts.

    Args:
        x: inputs [.., I].
        with_gradient: bool [..], whether the row's output gradient is not zero.
        mask: bool [..], False for padding; None: no mask fits.
    """
    # rows that count even without a gradient, if any row of the call has a gradient
    others = is_nonzero(x).reshape(with_gradient.shape)
    if mask is not None:
        others = others & mask
    return with_gradient | (others & with_gradient.any())


def by_example(rows: Tensor) -> Tensor:
    """Return rows [N, .., D] as [N, T, D]. For rows [N, D], T is 1. For a single row [D], N and T
    are 1."""
    if rows.ndim < 3:
        return rows.unsqueeze(-2) if rows.ndim == 2 else rows[None, None]
    return rows.flatten(1, -2)


class RowSums:
    """Adds the rows of calls to the sums of A and G.

    Args:
        weight_sharing: with "expand", every position is a row. This suits a loss with a term for
            each token. With "reduce", every example is a row: the mean of its inputs in A, and the
            sum of its output gradients in G. This suits a loss with a term for each sequence or
            image. Source: Eschenhagen et al. 2023 (arXiv:2311.00636).
        positions: whether convolutions take a sub-sample of positions, see ``convolutions.py``.
        stage: returns a context manager that measures the time. It is entered while rows are added.

    Attributes:
        step: number of the step. It decides which rows a sub-sample has.
    """

    def __init__(
        self,
        weight_sharing: str = "expand",
        positions: bool = True,
        stage: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.weight_sharing = weight_sharing
        self.positions = positions
        self.step = 0
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
            call: the call.
            x: its inputs [.., I], or images.
            kept: bool tensor of the rows' leading shape, True for rows that count.
            alive: bool scalar, whether any row counts.
            batch: the sum.
            stride: one of every ``stride`` rows is taken.
        """
        layer = call.layer
        layer_type = call.kind
        bias = layer.bias is not None
        with self._stage():
            if isinstance(layer_type, Convolution):
                patches = layer_type.input_patches(call.module, x)
                if self.weight_sharing == "expand":
                    patches.add_to_(
                        batch.sum_P, layer.A, self._grid(patches, call), bias=bias, kept=alive
                    )
                    batch.counts[ROWS].add_(patches.count * alive)
                    return
                # the mean of each example
                rows = patches.sums() * (len(patches.image) / max(1, patches.count))
                kept = alive.expand(len(rows))
                sample = EVERY_ROW
            elif self.weight_sharing == "reduce":
                x_NTD = by_example(x)
                kept_NT1 = kept.reshape(*x_NTD.shape[:2], 1)
                counts_N1 = kept_NT1.sum(dim=1)
                rows = torch.where(kept_NT1, x_NTD.float(), 0.0).sum(dim=1) / counts_N1.clamp(min=1)
                kept = counts_N1.reshape(-1) > 0
                sample = EVERY_ROW
            else:
                sample = self._sample(stride, kept.numel())
                rows = sample.of(x.reshape(-1, x.shape[-1]))
                kept = sample.of(kept.reshape(-1))
            scale: Tensor | float = sample.stride * call.share
            batch.counts[ROWS].add_(kept.sum() * scale)
            if call.mask is None and not bias and not layer_type.images:
                # If any row counts, the rows that do not count are zero, so the kernel need not
                # mask them. If no row counts, ``alive`` is False, and the scale is zero
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
        """Add the outer products of a call's output gradients, divided by ``scale``, to a sum of G.
        If the layer's A is made of gradients, they are added to a sum of A instead.

        Rows in fp32 are divided before the product, because the square of a gradient that is scaled
        by 2^16 may overflow. Rows in 16 bits are multiplied as they are, and the product is divided
        by the square of ``scale``. That cannot overflow: fp16 squares stay below 2^32, and bf16 is
        not scaled.

        Args:
            call: the call.
            x: its input, for types whose rows are made of inputs and gradients.
            gradient: its output gradients [.., O], or images.
            alive: bool scalar, whether any entry of the gradient is not zero. If all entries are
                zero, the call has no rows.
            batch: the sum.
            scale: the loss scale, a number or a scalar on the device.
            stride: one of every ``stride`` rows is taken.
        """
        layer = call.layer
        layer_type = call.kind
        with self._stage():
            if self.weight_sharing == "expand" and isinstance(layer_type, Convolution):
                patches = layer_type.gradient_patches(call.module, gradient)
                patches.add_to_(batch.sum_P, layer.G, self._grid(patches, call), gain=1.0 / scale)
                batch.counts[ROWS].add_(patches.count * alive)
                return
            rows = layer_type.gradient_rows(call.module, x, gradient)
            if self.weight_sharing == "reduce":
                rows = by_example(rows).sum(dim=1, dtype=torch.float32)
                sample = EVERY_ROW
            else:
                rows = rows.reshape(-1, rows.shape[-1])
                # a convolution has a sample of its own, and the rows of a norm need no matrix
                # product
                is_sampled = not layer_type.images and not layer_type.needs_gradients
                sample = self._sample(stride, len(rows)) if is_sampled else EVERY_ROW
                rows = sample.of(rows)
            factor: Tensor | float = float(sample.stride)
            if rows.dtype in HALVES:
                factor = factor / scale**2
            else:
                is_unscaled = isinstance(scale, float) and scale == 1.0
                rows = rows.float() if is_unscaled else rows.float() / scale
            side = layer.A if layer_type.needs_gradients else layer.G
            side.accumulate_(batch.sum_P, rows, scale=factor)
            batch.counts[ROWS].add_(len(rows) * sample.stride * alive)

    def _sample(self, stride: int, rows: int) -> Sample:
        """Return a sample of one row in ``stride``. The offset changes with the step, so that every
        row is equally likely to be taken."""
        stride = min(stride, rows)
        return EVERY_ROW if stride <= 1 else Sample(stride, phase(self.step, stride))

    def _grid(self, patches: Patches, call: Call) -> Grid:
        """Return the grid of a convolution's patches. A and G use the same grid."""
        return patches.grid(self.step if self.positions else None, max(call.layer.shape[-2:]))


def pairs(call: Call, x: Tensor, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return (inputs [N, T, I], output gradients [N, T, O]) of a call, in fp32. For a convolution
    these are its patches.

    If the layer has a bias, a 1 is appended to each input. The inputs of rows that do not count are
    zero.

    Args:
        call: the call.
        x: its inputs [.., I], or images.
        gradient: its output gradients [.., O], or images.
        kept: bool tensor of the rows' leading shape, True for rows that count.
    """
    layer_type: Any = call.kind
    if isinstance(layer_type, Convolution):
        x = layer_type.input_patches(call.module, x).all_rows()
        gradient = layer_type.gradient_patches(call.module, gradient).all_rows()
        kept = kept.expand(x.shape[:-1])
    else:
        gradient = layer_type.gradient_rows(call.module, x, gradient)
    x_NTI = by_example(x).float()
    g_NTO = by_example(gradient).float()
    if call.layer.bias is not None:
        x_NTI = torch.cat([x_NTI, torch.ones_like(x_NTI[..., :1])], dim=-1)
    return torch.where(kept.reshape(*x_NTI.shape[:2], 1), x_NTI, 0.0), g_NTO
