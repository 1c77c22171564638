"""Gradients of whole layers to their gradient workers, and the results back to every shard.

ZeRO gives a rank slices of flat parameters, in which matrices cannot be seen. So a layer's pieces travel to its
gradient workers, who put them together as [O, I], and the results travel back to whoever holds a slice.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, MessagePart, Move
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.update.groups import evenly_spaced
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.shards import Shard, ShardMap, of_layers, plan_gather, plan_scatter

Span = tuple[int, int]
"""A slice of a flat parameter: its start, and its elements."""


class ExchangePlan:
    """What moves between the shards of a map and the gradient workers. Pure.

    Args:
        workers: layer name -> ranks; one of them where gradients are partitioned.

    Attributes:
        of_layer: layer name -> its parameters.
        of_parameter: parameter -> workers.
    """

    def __init__(self, shards: ShardMap, layers: Sequence[LayerSpec], workers: Mapping[str, tuple[int, ...]]) -> None:
        self.of_layer = of_layers(layers)
        self.of_parameter = {param: workers[name] for name, params in self.of_layer.items() for param in params}
        self.gather = plan_gather(shards, self.of_parameter)
        self.scatter = plan_scatter(shards, self.of_parameter)


class Gradients:
    """Whole gradients of a rank's layers, layer name -> fp32 [O, I] as they will be applied. Each is taken once: a step
    holds a layer's gradient or its result.

    A tensor may be DeepSpeed's own memory, which only :class:`Results` may write to.
    """

    def __init__(self, held: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        self._held = dict(held)  # matrices, and what they are still to be multiplied by

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> Tensor:
        matrix_OI, factor = self._held[name]
        return matrix_OI.float() if factor is None else times(matrix_OI, factor)

    def pop(self, name: str) -> Tensor:
        matrix_OI = self[name]
        del self._held[name]
        return matrix_OI


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """In fp32. By a scalar the product of a tensor in 16 bits would be in 16 bits."""
    assert factor is not None
    return x * factor.view(1)


class GradientExchange:
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' workers.

    Args:
        dtypes: on the wire: of gradients to the workers, and of results back.

    Attributes:
        owned: layers this rank is a gradient worker of.
        params: layer name -> its parameters.
        shards: parameter -> the slices of it that this rank holds.
        sent: parameter -> the slices of its result that this rank sends to others.
    """

    def __init__(
        self,
        layout: ShardLayout,
        layers: Sequence[LayerSpec],
        workers: Mapping[str, tuple[int, ...]],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.layout, self.rank, self.device = layout, layout.rank, layout.engine.device
        self.plan = ExchangePlan(layout.shards, layers, workers)
        gather_dtype, self.scatter_dtype = dtypes
        self.owned = tuple(layer for layer in layers if layout.rank in workers[layer.name])
        self._here = {(shard.param, shard.start): shard for shard in layout.shards.on(self.rank)}
        self.shards: dict[int, list[Shard]] = {}
        for shard in self._here.values():
            self.shards.setdefault(shard.param, []).append(shard)
        self.gather_part = MessagePart("gradients", self.plan.gather, self._read, gather_dtype)
        self.params = {name: [*map(layout.param_of, params)] for name, params in self.plan.of_layer.items()}
        self.sent: dict[int, set[Span]] = {}
        for move in self.plan.scatter.moves:
            if move.source == self.rank:
                self.sent.setdefault(move.param, set()).add((move.start, move.numel))
        self._layer_of = {param: name for name, params in self.plan.of_layer.items() for param in params}

    def _read(self, move: Move) -> Tensor:
        return self.layout.to_wire(self._here[move.param, move.start])

    def gathered(self, received: Arrivals) -> Gradients:
        """Whole gradients of :attr:`owned`."""
        layout, flats = self.layout, dict[int, Tensor]()
        raw: set[int] = set()  # parameters whose gradients are still to be multiplied
        for param in (param for layer in self.owned for param in self.plan.of_layer[layer.name]):
            shards, numel = self.shards.get(param, []), layout.shards.numels[param]
            if len(shards) == 1 and shards[0].numel == numel:  # nothing to put together
                flats[param] = layout.gradient(shards[0]).to(self.device)
                if layout.factor(shards[0]) is not None:
                    raw.add(param)
                continue
            flats[param] = torch.empty(numel, dtype=layout.dtype, device=self.device)
            for shard in shards:
                flats[param][shard.start : shard.start + shard.numel] = layout.to_wire(shard)
            if layout.wire_factor is not None:
                raw.add(param)
        for move, values in received:
            flats[move.param][move.start : move.start + move.numel] = values
        held = {}
        for layer in self.owned:
            params = self.plan.of_layer[layer.name]
            factors = {param in raw for param in params}
            if len(factors) > 1:  # a weight and its bias are in groups that DeepSpeed treats one after the other
                applied = {param: times(flats[param], layout.seam.factor) for param in params if param in raw}
                flats |= applied
                factors = {False}
            weight, *bias = (flats.pop(param) for param in params)
            # with a bias the matrix is a copy
            matrix_OI = LAYERS[layer.kind].matrix(weight, bias[0] if bias else None, layer.shape)
            held[layer.name] = matrix_OI, layout.seam.factor if factors == {True} else None
        return Gradients(held)

    def write(self, results: "Results", received: Arrivals, scales: Mapping[str, Tensor] | None = None) -> None:
        """Put the results of other ranks' layers where the inner optimizer will find them.

        Args:
            results: of this rank's layers, which are there already.
            scales: layer name -> scalar to multiply its result by.
        """
        shards = [self._here[move.param, move.start] for move, _ in received]
        results.write(shards, [values for _, values in received])
        if scales is not None and results.views:
            torch._foreach_mul_(results.views, [scales[self._layer_of[shard.param]] for shard in results.written])

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """A layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """The optimizer's parameter group of each of the layer's parameters."""
        return tuple(self.layout.group_index(param) for param in self.params[layer.name])


class Results:
    """The results of a step. What belongs to shards on this rank is written there at once; what other ranks get waits
    here, in the dtype in which it travels, until it is in a message.

    Attributes:
        written, views: shards on this rank that have their results, and these.
        part: what other ranks get.
        release: to be called when ``part`` is in a message: frees it.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self.exchange = exchange
        self.written: list[Shard] = []
        self.views: list[Tensor] = []
        self._sent = sent = dict[tuple[int, Span], Tensor]()
        self.release = sent.clear
        # without self: a circle of references would keep a step's results until the next garbage collection
        self.part = MessagePart(
            "results", exchange.plan.scatter, lambda m: sent[m.param, (m.start, m.numel)], exchange.scatter_dtype
        )

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        """Take results in, of each layer a matrix of its shape. A parameter that was frozen since attach gets zeros."""
        exchange, shards, values = self.exchange, list[Shard](), list[Tensor]()
        for layer, matrix_OI in zip(layers, matrices, strict=True):
            indices, parameters = exchange.plan.of_layer[layer.name], exchange.params[layer.name]
            for param, parameter, flat in zip(indices, parameters, exchange.parts(layer, matrix_OI), strict=True):
                if not parameter.requires_grad:
                    flat = torch.zeros_like(flat)
                for span in exchange.sent.get(param, ()):
                    self._sent[param, span] = _cut_out(flat, span, exchange.scatter_dtype)
                for shard in exchange.shards.get(param, ()):
                    shards.append(shard)
                    values.append(self._own(layer, shard, flat))
        self.write(shards, values)

    def _own(self, layer: LayerSpec, shard: Shard, flat: Tensor) -> Tensor:
        """A shard's values, rounded as they arrive elsewhere: else replicas, and the copies of a layer that other
        tensor-parallel ranks work for, would drift apart."""
        layout, span = self.exchange.layout, (shard.start, shard.numel)
        if layout.replicated and (shard.param, span) in self._sent:
            return self._sent[shard.param, span]
        values = flat.narrow(0, *span)
        return values.to(self.exchange.scatter_dtype) if layer.copies > 1 and layout.world > 1 else values

    def write(self, shards: Sequence[Shard], values: Sequence[Tensor]) -> None:
        """Write the values of shards on this rank, divided by what DeepSpeed will still multiply them by."""
        if not shards:
            return
        layout = self.exchange.layout
        views = [layout.writable(shard) for shard in shards]
        raw = [index for index, shard in enumerate(shards) if layout.factor(shard) is not None]
        if raw:
            values = list(values)
            inverse = layout.seam.inverse
            for index in raw:
                values[index] = times(values[index], inverse)
        torch._foreach_copy_(views, list(values))
        self.written += shards
        self.views += views

    def memory(self, layers: Sequence[LayerSpec]) -> Tensor | None:
        """[n, O, I] in fp32: the memory of these layers' gradients, for the caller to write their results to in place of
        putting them. None where it is not one tensor, or not all of where the results belong."""
        exchange, layout = self.exchange, self.exchange.layout
        shards = []
        for layer in layers:
            param, *bias = exchange.plan.of_layer[layer.name]
            parameter = exchange.params[layer.name][0]
            here: Sequence[Shard] = exchange.shards.get(param, ())
            whole = len(here) == 1 and here[0].numel == layout.shards.numels[param]
            if bias or not whole or param in exchange.sent or not parameter.requires_grad or layer.copies > 1:
                return None
            if layout.factor(here[0]) is not None or not layout.held(here[0]):
                return None
            shards.append(here[0])
        views = [layout.writable(shard) for shard in shards]
        pairs = zip(layers, views, strict=True)
        together = evenly_spaced([LAYERS[layer.kind].matrix(view, None, layer.shape) for layer, view in pairs])
        if together is None or together.data_ptr() != views[0].data_ptr():
            return None
        if together.dtype is not torch.float32 or together.device != exchange.device:
            return None
        self.written += shards
        self.views += views
        return together.flatten(1, -2)


def _cut_out(flat: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """A slice that does not keep the whole tensor in memory: a copy, unless it is all of it and of that dtype."""
    part = flat.narrow(0, *span)
    return part.to(dtype, copy=len(part) < len(flat))
