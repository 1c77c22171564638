"""Weights shifted along a direction for a forward, and back: what a directional derivative of the model needs.

    J d = (f(w + eps d) - f(w)) / eps

needs forwards only, so it works wherever the engine can run one; d lies where the weights are that a forward reads: at
stages 0 to 2 whole on every rank, at stage 3 in the chunks that a forward gathers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Part
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.shards import Shard, ShardMap, plan_scatter, source
from ds_kfac.zero.stage3 import Stage3

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
        workers = exchange.plan.of_parameter
        self.plan = plan_scatter(shards, lambda param, rank: source(workers[param], rank, world))
        self._mine = shards.on(layout.rank)

    def part(self, direction: Mapping[str, Tensor]) -> tuple[Part, dict[int, Tensor]]:
        """Own layers' matrices, fp32 [O, I], to every rank's weights; and the same as flat tensors."""
        flats: dict[int, Tensor] = {}
        for layer in self.exchange.owned:
            parts = self.exchange.parts(layer, direction[layer.name])
            flats |= zip(self.exchange.plan.of_layer[layer.name], parts, strict=True)
        return (
            Part("results", self.plan, lambda m: flats[m.param].narrow(0, m.start, m.numel), torch.float32),
            flats,
        )

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
            self.layout.optimizer._partition_all_parameters()
