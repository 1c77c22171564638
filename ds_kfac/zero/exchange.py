"""Gradients of whole layers to their gradient workers, and the results back to every shard.

ZeRO gives a rank slices of flat parameters, in which matrices cannot be seen. So a layer's pieces
travel to its gradient workers, who put them together as [O, I], and the results travel back to
whoever holds a slice.
"""

from collections.abc import Collection, Mapping, Sequence

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

    def __init__(
        self, shards: ShardMap, layers: Sequence[LayerSpec], workers: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.of_layer = of_layers(layers)
        self.of_parameter = {
            param: workers[name] for name, params in self.of_layer.items() for param in params
        }
        self.gather = plan_gather(shards, self.of_parameter)
        self.scatter = plan_scatter(shards, self.of_parameter)


class Gradients:
    """Whole gradients of a rank's layers, layer name -> fp32 [O, I] as they will be applied. Each
    is taken once: a step holds a layer's gradient or its result.

    A tensor may be DeepSpeed's own memory, which only the exchange may write to.

    Args:
        held: layer name -> matrix, and what it is still to be multiplied by.
        joined: names of layers whose matrices were put together from pieces.
    """

    def __init__(
        self, held: Mapping[str, tuple[Tensor, Tensor | None]], joined: Collection[str] = ()
    ) -> None:
        self._held = dict(held)
        self._joined = joined

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> Tensor:
        matrix_OI, factor = self._held[name]
        return matrix_OI.float() if factor is None else times(matrix_OI, factor)

    def is_copy(self, name: str) -> bool:
        """Whether whoever takes the gradient may overwrite it."""
        matrix_OI, factor = self._held[name]
        return name in self._joined or factor is not None or matrix_OI.dtype is not torch.float32

    def pop(self, name: str) -> Tensor:
        matrix_OI = self[name]
        del self._held[name]
        return matrix_OI


class GradientExchange:
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' workers, and
    results back.

    A step calls :meth:`begin`, sends :attr:`gather_part`, takes the :meth:`gathered` gradients,
    puts a result for each, sends :attr:`scatter_part`, and writes what arrived.

    Args:
        dtypes: on the wire: of gradients to the workers, and of results back.

    Attributes:
        owned: layers this rank is a gradient worker of.
        params: layer name -> its parameters.
        shards: parameter -> the slices of it that this rank holds.
        sent: parameter -> the slices of its result that this rank sends to others.
        gradients: this rank's shards -> views of their gradients, and of their results once they
            are there.
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
        self.params = {
            name: [*map(layout.param_of, params)] for name, params in self.plan.of_layer.items()
        }
        self.gradients: dict[Shard, Tensor] = {}
        self._here = {(shard.param, shard.start): shard for shard in layout.own}
        self.shards: dict[int, list[Shard]] = {}
        for shard in layout.own:
            self.shards.setdefault(shard.param, []).append(shard)
        self.sent: dict[int, set[Span]] = {}
        for move in self.plan.scatter.moves:
            if move.source == self.rank:
                self.sent.setdefault(move.param, set()).add((move.start, move.numel))
        self._outbox: dict[tuple[int, Span], Tensor] = {}
        self.gather_part = MessagePart("gradients", self.plan.gather, self._to_wire, gather_dtype)

    def begin(self) -> None:
        """Look up where gradients lie in this step."""
        self._outbox.clear()  # of a step that raised
        self.gradients = self.layout.gradients()

    # gradients to their workers

    def _to_wire(self, move: Move) -> Tensor:
        return self._travelling(self._here[move.param, move.start])

    def _travelling(self, shard: Shard) -> Tensor:
        """A shard's gradient as it travels: raw or as it will be applied."""
        layout, gradient = self.layout, self.gradients[shard]
        if layout.seam.factor is None or layout.raw(shard) == layout.sends_raw:
            return gradient
        return times(
            gradient.to(self.device),
            layout.seam.inverse if layout.sends_raw else layout.seam.factor,
        )

    def gathered(self, received: Arrivals) -> Gradients:
        """Whole gradients of :attr:`owned`."""
        layout, factor = self.layout, self.layout.seam.factor
        flats: dict[int, Tensor] = {}
        raw: set[int] = set()  # parameters whose gradients are still to be multiplied
        joined: set[int] = set()
        for param in (param for layer in self.owned for param in self.plan.of_layer[layer.name]):
            shards, numel = self.shards.get(param, []), layout.shards.numels[param]
            is_whole = len(shards) == 1 and shards[0].numel == numel
            if layout.raw(shards[0]) if is_whole else layout.sends_raw and factor is not None:
                raw.add(param)
            if is_whole:  # nothing to put together
                flats[param] = self.gradients[shards[0]].to(self.device)
                continue
            joined.add(param)
            flats[param] = torch.empty(numel, dtype=layout.dtype, device=self.device)
            for shard in shards:
                flats[param][shard.start : shard.start + shard.numel] = self._travelling(shard)
        for move, values in received:
            flats[move.param][move.start : move.start + move.numel] = values
        held = {}
        for layer in self.owned:
            params = self.plan.of_layer[layer.name]
            # a weight and its bias may be in groups that DeepSpeed treats in turn
            if not raw.issuperset(params):
                flats |= {param: times(flats[param], factor) for param in raw.intersection(params)}
            weight, *bias = (flats.pop(param) for param in params)
            # with a bias the matrix is a copy
            matrix_OI = LAYERS[layer.kind].matrix(weight, bias[0] if bias else None, layer.shape)
            if any(map(layout.lacks, self.params[layer.name])):
                # a layer is stepped as a whole or stands still
                matrix_OI = torch.zeros_like(matrix_OI)
            held[layer.name] = matrix_OI, factor if raw.issuperset(params) else None
        return Gradients(
            held, [x.name for x in self.owned if joined.issuperset(self.plan.of_layer[x.name])]
        )

    # results to their shards

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        """Take results in, of each layer a matrix of its shape. What belongs to shards on this rank
        is written there; what other ranks get waits until it is in a message, in the dtype in which
        it travels. A parameter that was frozen since attach gets zeros."""
        shards, values = list[Shard](), list[Tensor]()
        for layer, matrix_OI in zip(layers, matrices, strict=True):
            indices, parameters = self.plan.of_layer[layer.name], self.params[layer.name]
            for param, parameter, flat in zip(
                indices, parameters, self.parts(layer, matrix_OI), strict=True
            ):
                if not parameter.requires_grad:
                    flat = torch.zeros_like(flat)
                for span in self.sent.get(param, ()):
                    self._outbox[param, span] = _cut_out(flat, span, self.scatter_dtype)
                # rounded as it arrives elsewhere: else replicas, and the copies of a layer that
                # other tensor-parallel ranks work for, would drift apart
                if (self.layout.replicated and param in self.sent) or (
                    layer.copies > 1 and self.layout.world > 1
                ):
                    flat = flat.to(self.scatter_dtype)
                for shard in self.shards.get(param, ()):
                    shards.append(shard)
                    values.append(flat.narrow(0, shard.start, shard.numel))
        self._write(shards, values)

    def memory(self, layers: Sequence[LayerSpec]) -> Tensor | None:
        """[n, O, I] in fp32: the memory of these layers' gradients, for the caller to write their
        results to in place of putting them. None where it is not one tensor, or not all of where
        the results belong."""
        views = []
        for layer in layers:
            param, *bias = self.plan.of_layer[layer.name]
            shards = self.shards.get(param, [])
            if (
                bias
                or len(shards) != 1
                or param in self.sent
                or layer.copies > 1
                or self.layout.raw(shards[0])
            ):
                return None
            if shards[0].numel < self.layout.shards.numels[param]:
                return None
            if not self.params[layer.name][0].requires_grad:
                return None
            views.append(LAYERS[layer.kind].matrix(self.gradients[shards[0]], None, layer.shape))
        together = evenly_spaced(views)
        if (
            together is None
            or together.dtype is not torch.float32
            or together.device != self.device
        ):
            return None
        return together.flatten(1, -2)

    def scatter_part(self) -> MessagePart:
        """What other ranks get."""
        outbox = self._outbox
        return MessagePart(
            "results",
            self.plan.scatter,
            lambda m: outbox[m.param, (m.start, m.numel)],
            self.scatter_dtype,
        )

    def sent_off(self) -> None:
        """What other ranks get is in a message: free it."""
        self._outbox.clear()

    def write(self, received: Arrivals, scales: Mapping[str, Tensor] | None = None) -> None:
        """Put the results of other ranks' layers where the inner optimizer will find them.

        Args:
            scales: layer name -> scalar to multiply its result by, of all layers.
        """
        self._write(
            [self._here[move.param, move.start] for move, _ in received],
            [values for _, values in received],
        )
        if scales is not None and self.gradients:
            layer_of = {
                param: name for name, params in self.plan.of_layer.items() for param in params
            }
            stacked = torch.stack([*scales.values()])
            # with offload gradients may lie on the host, or some of them
            on = {
                device: stacked.to(device).unbind()
                for device in {x.device for x in self.gradients.values()}
            }
            on_device = {
                device: dict(zip(scales, values, strict=True)) for device, values in on.items()
            }
            factors = [
                on_device[x.device][layer_of[shard.param]] for shard, x in self.gradients.items()
            ]
            torch._foreach_mul_([*self.gradients.values()], factors)
        self.gradients = {}  # DeepSpeed's step frees what they are of

    def _write(self, shards: Sequence[Shard], values: list[Tensor]) -> None:
        """Write the values of shards on this rank, divided by what DeepSpeed will still multiply
        them by."""
        if not shards:
            return
        for index, shard in enumerate(shards):
            if self.layout.raw(shard):
                values[index] = times(values[index], self.layout.seam.inverse)
        torch._foreach_copy_([self.gradients[shard] for shard in shards], values)

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """A layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """The optimizer's parameter group of each of the layer's parameters."""
        return tuple(self.layout.group_index(param) for param in self.params[layer.name])


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """In fp32. By a scalar the product of a tensor in 16 bits would be in 16 bits."""
    assert factor is not None
    return x * factor.view(1)


def _cut_out(flat: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """A slice that does not keep the whole tensor in memory: a copy, unless it is all of it and of
    that dtype."""
    part = flat.narrow(0, *span)
    return part.to(dtype, copy=len(part) < len(flat))
