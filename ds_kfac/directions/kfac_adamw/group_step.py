"""One group of layers in a step of KFACAdamW. This module defines how large a layer's step is, and
which parts of its matrix are orthogonalized separately."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config.keys import AdamConfig
from ds_kfac.model.blocks import named
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.newton_schulz import FULL
from ds_kfac.update.rotation import chunk_budget

SIZE = 27.0
"""Frobenius norm of an orthogonalized step at a learning rate of 1, divided by sqrt(max(O, I)). The
value was measured with gpt_small (benchmarks/convergence), whose width is 128, at AdamW's best
learning rate."""
BASE = 128
"""Number of inputs at which the learning rate of a head is adam_lr. A head with I inputs has the
learning rate adam_lr times BASE / I, but at least lr."""


def keeps_direction(options: AdamConfig, layer: LayerSpec) -> str | None:
    """Return why a layer keeps Adam's direction, or None if its direction is orthogonalized.

    Each shard of a tensor-parallel layer is orthogonalized separately, and so is each group of a
    grouped convolution. The step of each weight element has the same size as in an undivided layer.
    """
    if layer.keeps_direction is not None:
        return layer.keeps_direction
    module = layer.module
    pattern = next((pattern for pattern in options.except_layers if named(pattern, module)), None)
    if pattern is not None:
        return f"kfac.adam.except_layers {pattern!r}"
    if layer.makes_words and "except_layers" not in options.model_fields_set:
        return "it has the shape of an embedding, so it is taken for the head"
    return None


def step_norm(layer: LayerSpec, rows: int | None = None) -> float:
    """Return the norm of a step in units of :data:`SIZE`. In these units the norm is the square
    root of the longer side of the matrix that is orthogonalized.

    This matrix is the layer's matrix, the matrix of one group of a layer in groups, or a block of
    the layer's rows. The squared step norms of all tensor-parallel shards of a layer add up to the
    squared step norm of the undivided layer.

    Args:
        rows: number of the block's rows in this shard; None: the matrix has no blocks.
    """
    O, I = layer.whole_shape[-2:]  # noqa: E741
    O = O if rows is None else rows * layer.cut[0]  # noqa: E741
    return (max(O, I) / math.prod(layer.cut)) ** 0.5


def adam_factor(options: AdamConfig, layer: LayerSpec, ratio: float) -> float:
    """Return the factor by which Adam's direction is multiplied in this layer, or 1 if the layer's
    direction is orthogonalized.

    Args:
        ratio: adam_lr / lr.
    """
    if keeps_direction(options, layer) is None:
        return 1.0
    # a layer that keeps Adam's direction is a head, unless its type is the reason
    is_head = layer.keeps_direction is None
    return max(ratio * BASE / layer.whole_shape[-1], 1.0) if is_head else ratio


class GroupStep:
    """A group of layers in a step of KFACAdamW, with constants and intermediate results of the
    step.

    Note: Maps. A map is a matrix that is orthogonalized separately: a layer's matrix, the matrix of
    one group of a grouped convolution, or a block of a fused weight's rows. There are three cases:

    - All maps of a layer have the same shape and are consecutive views of the layer's matrix.
      ``maps`` is their number, and ``blocks`` is empty.
    - The blocks of a fused weight have several shapes, or their rows are not contiguous. ``blocks``
      has the number of rows of each block. The blocks are orthogonalized and scaled one by one.
      Everywhere else the layer counts as one map.
    - The direction is not orthogonalized. ``maps`` and ``blocks`` are as in the first case.

    Attributes:
        group: layers of the group and their state.
        layer_slice: slice that selects this group's layers from a vector with one entry per layer
            of this rank.
        orthogonal: whether the directions are orthogonalized.
        maps: number of maps of a layer.
        blocks: number of rows of each map in the second case above, otherwise ().
        rows_first: whether rows are rotated back before the orthogonalization, and only columns
            after it. This is True for a fused weight, because its blocks are rows of the weight,
            not of the rotated weight.
        normalized: whether each map is scaled to the norm ``target``. If False, ``target`` is a
            factor by which the map is multiplied.
        target: fp32 [layers x maps], norm or factor for each map, see ``normalized``.
        full: fp32 [layers x maps]. If ``normalized``, FULL times the square root of a map's number
            of elements; otherwise 1. If the norm of Adam's direction is below ``full``, the
            normalized result is multiplied by norm / full.
        block_target, block_full: ``target`` and ``full`` of each of ``blocks``, fp32 [blocks, 1].
        x_nOI: fp32 [n, O, I], intermediate result that becomes the direction.
        columns: fp32 [n, I], 0 for columns of the direction that are only rounding errors, else 1,
            see :meth:`ds_kfac.update.rotation.Rotation.columns_with_gradients`. It exists only if
            the group has eigenbases.
        largest: fp32 [layers], largest absolute entry of each layer's gradient.
        used: bool [layers], whether the layer takes a step.
        squared: fp32 [layers], squared norm of each layer's final direction.
        sizes: norms of the maps before they were orthogonalized. The list has one tensor [layers x
            maps], or a tensor [layers] for each of ``blocks``.
    """

    x_nOI: Tensor
    columns: Tensor
    largest: Tensor
    used: Tensor
    squared: Tensor
    sizes: list[Tensor]

    def __init__(
        self,
        group: LayerGroup,
        layer_slice: slice,
        options: AdamConfig,
        ratio: float,
        device: Any,
    ) -> None:
        layer = group.layers[0]
        rows = layer.shape[-2]
        self.group = group
        self.layer_slice = layer_slice
        self.orthogonal = keeps_direction(options, layer) is None
        self.rows_first = self.orthogonal and bool(layer.blocks)
        self.maps = group.maps
        self.blocks: tuple[int, ...] = layer.blocks if self.orthogonal else ()
        if self.blocks and len({*self.blocks}) == 1 and sum(self.blocks) == rows:
            self.maps = len(self.blocks)
            self.blocks = ()
        self.normalized = self.orthogonal and not self.blocks
        factor = adam_factor(options, layer, ratio)
        constants = factor, 1.0
        if self.normalized:
            constants = _norm_and_full(layer, rows // self.maps if self.rows_first else None)
        constants_of_maps = torch.tensor(
            [constants] * (len(group.layers) * self.maps), dtype=torch.float32, device=device
        )
        self.target, self.full = constants_of_maps.T.contiguous()
        if self.blocks:
            repeats = rows // sum(self.blocks)
            constants_of_blocks = torch.tensor(
                [_norm_and_full(layer, repeats * block) for block in self.blocks],
                dtype=torch.float32,
                device=device,
            )
            self.block_target, self.block_full = constants_of_blocks.T[..., None]

    def maps_to_orthogonalize(self) -> list[Tensor]:
        """Return the group's maps as a list of tensors [matrices, rows, I]: one tensor with all
        maps, or one tensor for each of ``blocks``. They are views of ``x_nOI``, unless a block's
        rows are not contiguous."""
        if self.blocks:
            return [rows.flatten(-3, -2) for rows in row_blocks(self.x_nOI, self.blocks)]
        return [self.x_nOI.view(len(self.target), -1, self.x_nOI.shape[-1])]


def _norm_and_full(layer: LayerSpec, rows: int | None) -> tuple[float, float]:
    """Return ``target`` and ``full`` of an orthogonalized map, see :class:`GroupStep`.

    Args:
        rows: number of rows of the block that is the map; None: all rows.
    """
    height = layer.shape[-2] if rows is None else rows
    return SIZE * step_norm(layer, rows), FULL * (height * layer.shape[-1]) ** 0.5


def row_blocks(x_OI: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split the rows of matrices into the blocks of a fused weight, see :attr:`LayerSpec.blocks`.

    Args:
        x_OI: [.., O, I].
        sizes: number of rows of each block. The blocks repeat until all rows are used. () for a
            single block with all rows.

    Returns a list with a view [.., repeats, size, I] for each of ``sizes``.
    """
    sizes = list(sizes) or [x_OI.shape[-2]]
    return list(x_OI.unflatten(-2, (-1, sum(sizes))).split(sizes, dim=-2))


def same_sides(maps: Sequence[Tensor]) -> list[list[int]]:
    """Divide maps into lists, and return the indices of each list's maps. All maps of a list have
    the same two sides, in either order.

    Together the maps of a list have at most as many elements as
    :func:`ds_kfac.update.rotation.chunk_budget` allows for a matrix of their size. A map with more
    elements has a list of its own.
    """
    open_lists: dict[Hashable, list[int]] = {}
    full_lists: list[list[int]] = []
    for index, x in enumerate(maps):
        sides = tuple(sorted(x.shape[-2:]))
        indices = open_lists.setdefault(sides, [])
        limit = chunk_budget(batched=True, numel=x[0].numel())
        if indices and sum(maps[other].numel() for other in indices) + x.numel() > limit:
            full_lists.append(indices)
            indices = []
            open_lists[sides] = indices
        indices.append(index)
    return [*full_lists, *open_lists.values()]
