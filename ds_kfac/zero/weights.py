"""Weights that change besides the optimizer's step: rescaled after it, and shifted for a forward.

Rescaling (Osawa et al. 2019, arXiv:1811.12019; SP-NGD) is for layers before a norm, to which the size of their weights
is only a learning rate:

    w <- w min(1, sqrt(2 O) / (|w| + 1e-9))        O the first dimension of w: outputs

DeepSpeed's fp32 masters and the weights that the model computes with are multiplied by the same number, which every
rank knows: a whole weight's norm, at stage 3 put together from the chunks of all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Part
from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.registry import MATRICES
from ds_kfac.zero.deepspeed_versions import release_parameters
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ReplicatedHalf, ShardLayout
from ds_kfac.zero.shards import Shard, ShardMap, parameter_names, plan_scatter
from ds_kfac.zero.stages import Stage3, Stage12

SMALLEST = 1e-9


class WeightRescaling:
    """Of an engine's linear and convolutional K-FAC layers; these in the order of the layout's parameters."""

    def __init__(self, layout: ShardLayout, layers: Sequence[LayerSpec]) -> None:
        place = {name: index for index, name in enumerate(parameter_names(layers))}
        self.layout: Any = layout
        self.weights = [place[layer.weight] for layer in layers if layer.kind in MATRICES and layer.part[1] == 1]
        limits = [(2 * parameter_shape(layout.params[index])[0]) ** 0.5 for index in self.weights]
        self._limits = torch.tensor(limits, device=layout.engine.device)

    @torch.no_grad()
    def __call__(self) -> None:
        """After a step that was applied. Collective at stage 3."""
        factors = (self._limits / (self._norms() + SMALLEST)).clamp(max=1.0)
        for index, factor in zip(self.weights, factors.unbind(), strict=True):
            for part in {id(part): part for part in self._parts(index)}.values():
                part.mul_(factor.to(part.device))

    def _norms(self) -> Tensor:
        """Of the whole weights, fp32."""
        if not isinstance(self.layout, Stage3):
            weights = (self.layout.params[index].detach().float() for index in self.weights)
            return torch.stack([torch.linalg.vector_norm(weight) for weight in weights])
        squares = torch.zeros_like(self._limits)
        for place, index in enumerate(self.weights):
            for master in self._masters(index):
                squares[place] += master.float().square().sum().to(squares.device)
        dist.all_reduce(squares, group=self.layout.group)
        return squares.sqrt()

    def _masters(self, index: int) -> list[Tensor]:
        """What ZeRO's on this rank have of a weight."""
        own = (shard for shard in self.layout.whole.of_param[index] if shard.rank == self.layout.rank)
        return [self.layout.masters[s.group].data.narrow(0, s.offset, s.numel) for s in own]

    def _parts(self, index: int) -> list[Tensor]:
        """Everything on this rank that holds the weight, or a piece of it."""
        layout, param = self.layout, self.layout.params[index]
        if isinstance(layout, Stage3):
            whole = [param.data] if param.data.numel() == param.ds_numel else []
            return [param.ds_tensor.data, *whole, *self._masters(index)]
        if isinstance(layout, Stage12):
            return [param.data, *self._masters(index)]
        if isinstance(layout, ReplicatedHalf):
            (group, position), flat = layout.place[id(param)], getattr(layout.optimizer, "fp32_groups_flat", None)
            if flat is None:  # FP16_UnfusedOptimizer
                return [param.data, layout.optimizer.fp32_groups[group][position].data]
            start = sum(other.numel() for other in layout.groups[group][:position])
            return [param.data, flat[group].data.narrow(0, start, param.numel())]
        return [param.data]


# Weights shifted along a direction for a forward, and back: what a directional derivative of the model needs.
#
#     J d = (f(w + eps d) - f(w)) / eps
#
# needs forwards only, so it works wherever the engine can run one; d lies where the weights are that a forward reads:
# at stages 0 to 2 whole on every rank, at stage 3 in the chunks that a forward gathers.


Pieces = Mapping[tuple[int, int], Tensor]
"""(parameter, first element) -> flat fp32: a direction as it lies on this rank."""


class WeightShift:
    """Of a layout's parameters."""

    def __init__(self, layout: ShardLayout, exchange: GradientExchange) -> None:
        self.layout, self.exchange = layout, exchange
        self.chunked = isinstance(layout, Stage3)
        shards, world = layout.shards, layout.world
        if not self.chunked:
            every = [Shard(i, 0, n, rank, 0, 0) for i, n in enumerate(shards.numels) for rank in range(world)]
            shards = ShardMap(world, shards.numels, tuple(every))
        self.plan = plan_scatter(shards, exchange.plan.of_parameter)
        self._mine = shards.on(layout.rank)

    def part(self, direction: Mapping[str, Tensor]) -> tuple[Part, dict[int, Tensor]]:
        """Own layers' matrices, fp32 [O, I], to every rank's weights; and the same as flat tensors."""
        flats: dict[int, Tensor] = {}
        for layer in self.exchange.owned:
            parts = self.exchange.parts(layer, direction[layer.name])
            flats |= zip(self.exchange.plan.of_layer[layer.name], parts, strict=True)
        return (Part("results", self.plan, lambda m: flats[m.param].narrow(0, m.start, m.numel), torch.float32), flats)

    def pieces(self, flats: Mapping[int, Tensor], received: Arrivals) -> Pieces:
        """What this rank has of a direction."""
        found = {
            (shard.param, shard.start): flats[shard.param].narrow(0, shard.start, shard.numel)
            for shard in self._mine
            if shard.param in flats
        }
        return found | {(move.param, move.start): values for move, values in received}

    def squared_norm(self) -> Tensor:
        """Of the weights; at stage 3 of this rank's part of them."""
        return sum((self._weight(shard).float().square().sum() for shard in self._mine), start=torch.zeros(()))

    @contextmanager
    def by(self, pieces: Pieces, size: Tensor) -> Iterator[None]:
        """w + size pieces inside, w after it."""
        self._release()
        before = []
        for shard in self._mine:
            weight = self._weight(shard)
            before.append((weight, weight.clone()))
            weight.add_((pieces[shard.param, shard.start] * size).to(weight.device))
        try:
            yield
        finally:
            for weight, value in before:
                weight.copy_(value)
            self._release()

    def write(self, pieces: Pieces) -> None:
        """Put a direction where the engine's optimizer will find it as a gradient."""
        for shard in self.layout.shards.on(self.layout.rank):
            start = shard.start if self.chunked else 0
            piece = pieces[shard.param, start]
            self.layout.write(shard, piece.narrow(0, shard.start - start, shard.numel))

    def _weight(self, shard: Shard) -> Tensor:
        """Flat, a view."""
        param, start = self.layout.param_of(shard.param), self.layout.span(shard.param)[0] + shard.start
        if self.chunked:
            start = self.layout.around[shard][1]
        return (param.ds_tensor if self.chunked else param).data.view(-1).narrow(0, start, shard.numel)

    def _release(self) -> None:
        """Gathered weights at stage 3: a forward gathers what is in the chunks then."""
        if self.chunked:
            release_parameters(self.layout.optimizer)
