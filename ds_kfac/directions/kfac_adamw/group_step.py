"""Layers of one shape on their way through a step of KFACAdamW: what a step's size is, and which
parts of a matrix are orthogonalized by themselves."""

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
"""Frobenius norm of an orthogonalized step over sqrt(max(O, I)); measured with gpt_small
(benchmarks/convergence), of width 128, at AdamW's best rate."""
BASE = 128
"""Inputs of a head at and below which its rate is adam_lr; a wider one has BASE / I of it, at least
lr."""


def keeps_direction(options: AdamConfig, layer: LayerSpec) -> str | None:
    """Why a layer keeps Adam's direction; None if it is orthogonalized: of a tensor-parallel layer
    every shard by itself, of one in groups every group, so that a step has the same size per entry
    as that of a whole layer."""
    if layer.keeps_direction is not None:
        return layer.keeps_direction
    module = layer.module
    pattern = next((pattern for pattern in options.except_layers if named(pattern, module)), None)
    if pattern is not None:
        return f"kfac.adam.except_layers {pattern!r}"
    guessed = layer.makes_words and "except_layers" not in options.model_fields_set
    return "it has the shape of an embedding: the head" if guessed else None


def step_norm(layer: LayerSpec, rows: int | None = None) -> float:
    """What SIZE is multiplied by: the root of the longer side of a layer's matrix, of that of one
    of its groups, or of a block of so many ``rows`` of it. Of a tensor-parallel shard it is the
    shard's part of the whole layer's."""
    O, I = layer.whole_shape[-2:]  # noqa: E741
    O = O if rows is None else rows * layer.cut[0]  # noqa: E741
    return (max(O, I) / math.prod(layer.cut)) ** 0.5


def adam_factor(options: AdamConfig, layer: LayerSpec, ratio: float) -> float:
    """What multiplies the direction of a layer that keeps Adam's.

    Args:
        ratio: adam_lr / lr.
    """
    if keeps_direction(options, layer) is None:
        return 1.0
    head = layer.keeps_direction is None  # it makes the model's outputs
    return max(ratio * BASE / layer.whole_shape[-1], 1.0) if head else ratio


class GroupStep:
    """Layers of one shape on their way through a step, with its constants. A map is a matrix that
    is orthogonalized by itself: a layer's, that of a group of a grouped convolution, or a block of
    a fused weight's rows.

    Attributes:
        group: the layers.
        own: its layers in vectors of this rank's layers.
        orthogonal: whether directions are orthogonalized.
        maps: how many a layer has: views of its matrix, all of one shape.
        blocks: rows of each map, where these are of several shapes or lie apart. After they were
            scaled, each to its own norm, the layer counts as one map.
        rows_first: whether the rows leave the eigenbasis before, the columns after
            orthogonalization: blocks are rows of the weight, not of its rotation.
        normalized: whether the result gets a norm of its own (:func:`scale_to`); else it is Adam's
            times a factor.
        target, full: fp32 [layers x maps], the norm and FULL times the root of the map's elements;
            or the factor and 1.
        x_nOI: the direction as far as it has come, [n, O, I] as in the group.
        largest, used, squared: of each layer the largest entry of its gradient, whether it is
            stepped, and the squared norm of its direction.
        sizes: norms of what was orthogonalized, [layers x maps]; of ``blocks`` [layers] each.
    """

    x_nOI: Tensor
    largest: Tensor
    used: Tensor
    squared: Tensor
    sizes: list[Tensor]

    def __init__(
        self, group: LayerGroup, own: slice, options: AdamConfig, ratio: float, device: Any
    ) -> None:
        layer = group.layers[0]
        self.group, self.own, self.orthogonal = group, own, keeps_direction(options, layer) is None
        self.maps, self.blocks = group.maps, layer.blocks if self.orthogonal else ()
        if self.blocks and len({*self.blocks}) == 1 and sum(self.blocks) == layer.shape[-2]:
            self.maps, self.blocks = len(self.blocks), ()
        self.normalized = self.orthogonal and not self.blocks
        self.rows_first = self.orthogonal and bool(layer.blocks)

        def norm_and_full(rows: int | None) -> tuple[float, float]:
            height = layer.shape[-2] if rows is None else rows
            return SIZE * step_norm(layer, rows), FULL * (height * layer.shape[-1]) ** 0.5

        constants = adam_factor(options, layer, ratio), 1.0
        if self.normalized:
            constants = norm_and_full(layer.shape[-2] // self.maps if self.rows_first else None)
        of_maps = torch.tensor(
            [constants] * (len(group.layers) * self.maps), dtype=torch.float32, device=device
        )
        self.target, self.full = of_maps.T.contiguous()
        if self.blocks:
            repeats = layer.shape[-2] // sum(self.blocks)
            of_blocks = [norm_and_full(repeats * rows) for rows in self.blocks]
            sizes = torch.tensor(of_blocks, dtype=torch.float32, device=device)
            self.block_target, self.block_full = sizes.T[..., None]  # [blocks, 1]


def row_blocks(x_OI: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views [.., repeats, size, I] of a matrix's rows, see :attr:`LayerSpec.blocks`; of all of them
    without sizes."""
    sizes = list(sizes) or [x_OI.shape[-2]]
    return list(x_OI.unflatten(-2, (-1, sum(sizes))).split(sizes, dim=-2))


def same_sides(maps: Sequence[Tensor]) -> list[list[int]]:
    """Indices of those with the same sides, as they are or transposed, at most so many elements as
    :func:`ds_kfac.update.rotation.chunk_budget` has for a matrix of this size, unless one alone has
    more."""
    groups: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for index, x in enumerate(maps):
        sides = tuple(sorted(x.shape[-2:]))
        group = groups.setdefault(sides, [])
        limit = chunk_budget(batched=True, numel=x[0].numel())
        if group and sum(maps[other].numel() for other in group) + x.numel() > limit:
            full.append(group)
            groups[sides] = group = []
        group.append(index)
    return [*full, *groups.values()]
