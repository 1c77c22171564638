"""Gradients of whole layers to their owners, and the owners' results back to every shard: the relayout at work."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import LAYERS
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.relayout import Move, plan_gather, plan_scatter


def parameter_names(layers: tuple[LayerSpec, ...]) -> list[str]:
    """Names of the preconditioned parameters, in the order of :attr:`Shard.param`."""
    return [name for layer in layers for name in layer.parameters]


class GradientExchange:
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' owners.

    Args:
        owners: layer name -> rank.
        group: process group of the exchanges; not DeepSpeed's own, whose order of collectives is its own affair.
    """

    def __init__(
        self, layout: ShardLayout, layers: tuple[LayerSpec, ...], owners: Mapping[str, int], group: Any
    ) -> None:
        self.layout, self.rank, self.device, self.group = layout, layout.rank, layout.engine.device, group
        self.owned = tuple(layer for layer in layers if owners[layer.name] == layout.rank)
        self._param = {name: index for index, name in enumerate(parameter_names(layers))}
        self.owners = {self._param[p]: owners[layer.name] for layer in layers for p in layer.parameters}
        self._mine = {(shard.param, shard.start): shard for shard in layout.shards.on(self.rank)}
        self.gather_plan = plan_gather(layout.shards, self.owners)
        self.scatter_plan = plan_scatter(layout.shards, self.owners)

    def gather(self) -> dict[str, Tensor]:
        """Own layers' whole gradients, fp32 [O, I] on the device, still carrying the loss scale. Collective."""
        received = self._execute(self.gather_plan, self._read, self.layout.dtype)
        flats: dict[int, Tensor] = {}
        for layer in self.owned:
            for name in layer.parameters:
                param = self._param[name]
                numel, whole = self.layout.shards.numels[param], self._mine.get((param, 0))
                if whole is not None and whole.numel == numel:  # nothing to put together
                    flats[param] = self.layout.read(whole).to(self.device, torch.float32)
                else:
                    flats[param] = torch.empty(numel, device=self.device)
        for (param, start), shard in self._mine.items():
            if param in flats and shard.numel < len(flats[param]):
                flats[param][start : start + shard.numel] = self.layout.read(shard)
        for move, piece in received:
            flats[move.param][move.start : move.start + move.numel] = piece
        matrices = {}
        for layer in self.owned:
            pieces = [flats[self._param[name]] for name in layer.parameters]
            bias = pieces[1] if layer.bias else None
            matrices[layer.name] = LAYERS[layer.kind].matrix(pieces[0], bias, (layer.dim_G, layer.dim_A))
        return matrices

    def scatter(self, results: Mapping[str, Tensor]) -> None:
        """Own layers' results, fp32 [O, I], to every rank that holds a shard of them. Collective."""
        flats: dict[int, Tensor] = {}
        for layer in self.owned:
            pieces = self.parts(layer, results[layer.name])
            flats |= {self._param[name]: piece for name, piece in zip(layer.parameters, pieces, strict=True)}
        received = self._execute(
            self.scatter_plan, lambda move: flats[move.param].narrow(0, move.start, move.numel), torch.float32
        )
        for (param, start), shard in self._mine.items():
            if param in flats:
                self.layout.write(shard, flats[param].narrow(0, start, shard.numel))
        for move, piece in received:
            self.layout.write(self._mine[move.param, move.start], piece)

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """A layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """The optimizer's parameter group of each of the layer's parameters."""
        return tuple(self.layout.group_index(self.layout.params[self._param[name]]) for name in layer.parameters)

    def _read(self, move: Move) -> Tensor:
        return self.layout.read(self._mine[move.param, move.start])

    def _execute(self, plan, piece: Callable[[Move], Tensor], dtype: torch.dtype) -> list[tuple[Move, Tensor]]:
        return plan.execute(self.rank, piece, dtype=dtype, device=self.device, group=self.group)
