"""Packed triangles of all layers in one flat fp32 buffer, ordered by owner; reduced to the owners only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_kfac.capture import BatchSums
from ds_kfac.layers.base import LayerSpec

ALIGNMENT = 32
"""Elements; every layer starts at a multiple, so that vectorised kernels may assume it."""


@dataclass(frozen=True)
class Slot:
    """Where the sums of one use of a layer lie in the bucket: counts [2], A [P], G [P], each aligned."""

    counts: int
    A: int
    G: int
    stop: int


@dataclass(frozen=True)
class FactorBucket:
    """The layout of one step's sums. Pure; the same on every rank.

    Attributes:
        slots: by layer name, in order of owners; one per use.
        norms: per rank, the place in its segment of one more number that is summed over ranks.
        splits: elements per owner; the segments follow each other in rank order.
    """

    slots: Mapping[str, tuple[Slot, ...]]
    norms: tuple[int, ...]
    splits: tuple[int, ...]

    @classmethod
    def plan(cls, layers: Sequence[LayerSpec], owners: Mapping[str, int], world: int) -> "FactorBucket":
        """Lay the layers out by owner, each start aligned."""
        slots, norms, splits, end = {}, [], [], 0
        for rank in range(world):
            norms.append(end)
            first, end = end, end + ALIGNMENT
            for layer in layers:
                if owners[layer.name] == rank:
                    own = []
                    for use in layer.uses:
                        starts = [end]
                        for size in (2, use.A.numel, use.G.numel):
                            starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
                        own.append(Slot(*starts))
                        end = starts[-1]
                    slots[layer.name] = tuple(own)
            splits.append(end - first)
        return cls(slots, tuple(norms), tuple(splits))

    @property
    def numel(self) -> int:
        return sum(self.splits)

    def views(self, flat: Tensor, layers: Sequence[LayerSpec], base: int = 0) -> dict[str, tuple[BatchSums, ...]]:
        """The layers' sums as views of ``flat``, whose first element is bucket position ``base``."""
        return {
            layer.name: tuple(
                BatchSums(
                    flat.narrow(0, slot.A - base, use.A.numel),
                    flat.narrow(0, slot.G - base, use.G.numel),
                    flat.narrow(0, slot.counts - base, 2),
                )
                for use, slot in zip(layer.uses, self.slots[layer.name], strict=True)
            )
            for layer in layers
        }

    def reduce_to_owners(self, flat: Tensor, rank: int, group: Any) -> Tensor:
        """Sum every segment on its owner; returns this rank's segment. One collective, entered by all ranks.

        An all-to-all followed by a local sum in rank order: the bytes of a reduce-scatter with uneven segments
        (which neither gloo nor NCCL has), and the same result whatever the order of arrival.
        """
        world = len(self.splits)
        if world == 1:
            return flat
        own = self.splits[rank]
        received = flat.new_empty(world * own)
        dist.all_to_all_single(
            received, flat, output_split_sizes=[own] * world, input_split_sizes=list(self.splits), group=group
        )
        return torch.sum(received.view(world, own), dim=0)
