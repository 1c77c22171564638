"""Gradients of whole layers to their gradient workers, and the workers' results back to every shard."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import LAYERS
from ds_kfac.mail import Arrivals, Leg
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.regions import regional, regions
from ds_kfac.zero.relayout import Move, plan_gather, plan_scatter, source
from ds_kfac.zero.shards import Shard, ShardMap


class ExchangePlan:
    """What moves between the shards of a map and the gradient workers. Pure. :attr:`Move.param` is a region.

    Args:
        workers: layer name -> ranks; one of them where gradients are partitioned.

    Attributes:
        regions: of all layers.
        of_layer: layer name -> indices of its regions, one for each parameter.
        shards: of regions.
        workers: region -> ranks.
    """

    def __init__(self, shards: ShardMap, layers: Sequence[LayerSpec], workers: Mapping[str, tuple[int, ...]]) -> None:
        self.regions = regions(layers, shards.numels)
        self.shards = regional(shards, self.regions)
        self.of_layer: dict[str, tuple[int, ...]] = {}
        for index, region in enumerate(self.regions):
            self.of_layer[region.layer] = (*self.of_layer.get(region.layer, ()), index)
        self.workers = {index: workers[region.layer] for index, region in enumerate(self.regions)}
        self.gather = plan_gather(self.shards, {index: ranks[0] for index, ranks in self.workers.items()})
        self.scatter = plan_scatter(self.shards, lambda index, rank: source(self.workers[index], rank, shards.world))

    @property
    def of_parameter(self) -> dict[int, tuple[int, ...]]:
        """Parameter -> workers of its first region, for the self-test."""
        return {region.param: self.workers[index] for index, region in reversed(list(enumerate(self.regions)))}


class GradientExchange:
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' workers.

    Args:
        dtypes: on the wire, of gradients to the workers and of results back.

    Attributes:
        owned: layers this rank is a gradient worker of.
    """

    def __init__(
        self,
        layout: ShardLayout,
        layers: Sequence[LayerSpec],
        workers: Mapping[str, tuple[int, ...]],
        dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        self.layout, self.rank, self.device = layout, layout.rank, layout.engine.device
        self.plan = ExchangePlan(layout.shards, layers, workers)
        self.gather_dtype, self.scatter_dtype = dtypes or (layout.dtype, torch.float32)
        self.owned = tuple(layer for layer in layers if layout.rank in workers[layer.name])
        self._mine = {(shard.param, shard.start): shard for shard in self.plan.shards.on(self.rank)}
        self._whole = self._parameters_shards()

    def _parameters_shards(self) -> dict[tuple[int, int], tuple[Shard, int]]:
        """(region, start) of each own piece -> the layout's shard that it lies in, and where."""
        own: dict[int, list[Shard]] = {}
        for shard in self.layout.shards.on(self.rank):
            own.setdefault(shard.param, []).append(shard)
        found = {}
        for key, piece in self._mine.items():
            region = self.plan.regions[piece.param]
            start = region.start + piece.start
            shard = next(s for s in own[region.param] if s.start <= start < s.start + s.numel)
            found[key] = shard, start - shard.start
        return found

    @property
    def gather_leg(self) -> Leg:
        """Pieces of gradients to their workers, still carrying the loss scale."""
        return Leg("gradients", self.plan.gather, self._read, self.gather_dtype)

    def gathered(self, received: Arrivals) -> dict[str, Tensor]:
        """Own layers' whole gradients, fp32 [O, I] on the device."""
        flats: dict[int, Tensor] = {}
        for layer in self.owned:
            for region in self.plan.of_layer[layer.name]:
                numel, whole = self.plan.shards.numels[region], self._mine.get((region, 0))
                if whole is not None and whole.numel == numel:  # nothing to put together
                    flats[region] = self._stored(whole).to(self.device, torch.float32)
                else:
                    flats[region] = torch.empty(numel, device=self.device)
        for (region, start), piece in self._mine.items():
            if region in flats and piece.numel < len(flats[region]):
                flats[region][start : start + piece.numel] = self._stored(piece)
        for move, values in received:
            flats[move.param][move.start : move.start + move.numel] = values
        matrices = {}
        for layer in self.owned:
            pieces = [flats[region] for region in self.plan.of_layer[layer.name]]
            bias = pieces[1] if layer.bias else None
            matrices[layer.name] = LAYERS[layer.kind].matrix(pieces[0], bias, (layer.dim_G, layer.dim_A))
        return matrices

    def scatter_leg(self, results: Mapping[str, Tensor]) -> tuple[Leg, dict[int, Tensor]]:
        """Own layers' results, fp32 [O, I], to every rank that holds a shard of them; and the same as flat tensors."""
        flats: dict[int, Tensor] = {}
        for layer in self.owned:
            pieces = self.parts(layer, results[layer.name])
            if self.layout.replicated:  # what the others receive, or the replicas would drift apart
                pieces = tuple(piece.to(self.scatter_dtype).float() for piece in pieces)
            flats |= dict(zip(self.plan.of_layer[layer.name], pieces, strict=True))
        leg = Leg(
            "results",
            self.plan.scatter,
            lambda move: flats[move.param].narrow(0, move.start, move.numel),
            self.scatter_dtype,
        )
        return leg, flats

    def write(self, flats: Mapping[int, Tensor], received: Arrivals, scales: Mapping[str, Tensor]) -> None:
        """Put own and received results where the engine's optimizer will find them.

        Args:
            scales: layer name -> scalar to multiply its result by; layers that are missing stay as they are.
        """

        def scaled(region: int, values: Tensor) -> Tensor:
            scale = scales.get(self.plan.regions[region].layer)
            return values.float() if scale is None else values.float() * scale

        pieces = {
            (region, start): flats[region].narrow(0, start, piece.numel)
            for (region, start), piece in self._mine.items()
            if region in flats
        }
        pieces |= {(move.param, move.start): values for move, values in received}
        whole: dict[Shard, Tensor] = {}
        for (region, start), values in pieces.items():
            shard, offset = self._whole[region, start]
            if len(values) == shard.numel:
                self.layout.write(shard, scaled(region, values))
            else:  # it is written at once, when all its row blocks are there
                if shard not in whole:
                    whole[shard] = torch.empty(shard.numel, device=self.device)
                whole[shard].narrow(0, offset, len(values)).copy_(scaled(region, values))
        for shard, values in whole.items():
            self.layout.write(shard, values)

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """A layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def without_frozen(self, layer: LayerSpec, matrix_OI: Tensor) -> Tensor:
        """Zero where a parameter has been frozen since attach."""
        params = [self.layout.params[self.plan.regions[index].param] for index in self.plan.of_layer[layer.name]]
        if all(param.requires_grad for param in params):
            return matrix_OI
        parts = self.parts(layer, matrix_OI)
        kept = [part if p.requires_grad else torch.zeros_like(part) for part, p in zip(parts, params, strict=True)]
        bias = kept[1] if layer.bias else None
        return LAYERS[layer.kind].matrix(kept[0], bias, (layer.dim_G, layer.dim_A))

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """The optimizer's parameter group of each of the layer's parameters."""
        params = (self.plan.regions[region].param for region in self.plan.of_layer[layer.name])
        return tuple(self.layout.group_index(self.layout.params[param]) for param in params)

    def _read(self, move: Move) -> Tensor:
        return self._stored(self._mine[move.param, move.start])

    def _stored(self, piece: Shard) -> Tensor:
        shard, offset = self._whole[piece.param, piece.start]
        values = self.layout.read(shard)
        return values if piece.numel == shard.numel else values.narrow(0, offset, piece.numel)
