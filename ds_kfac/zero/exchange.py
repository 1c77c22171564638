"""Brings whole gradients to the layers' gradient workers, and results back to every shard.

ZeRO gives a rank shards of flat parameters, in which matrices cannot be seen. So the shards of a
layer travel to its gradient workers, which put them together as [O, I], and the results travel back
to the ranks that hold the shards.

Note: Raw gradients. A gradient is *raw* if DeepSpeed has not multiplied it by the seam's factor
    yet, and will do so after K-FAC's step. In one step some groups may be raw and others not. All
    shards travel alike: raw if :attr:`ShardLayout.sends_raw`, since 16 bits then hold them exactly;
    else as they will be applied. Results are divided by the factor where they are written over a
    raw gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, MessagePart, Move
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.update.groups import evenly_spaced
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.shards import Shard, ShardMap, of_layers, plan_gather, plan_scatter

Span = tuple[int, int]
"""(first element, number of elements) in a flat parameter."""


class ExchangePlan:
    """What moves between the shards of a map and the gradient workers. Pure.

    Args:
        workers: layer name -> ranks of its gradient workers; one rank if gradients are partitioned.

    Attributes:
        of_layer: layer name -> indices of its parameters in ``shards``.
        gather: moves of gradients to their workers.
        scatter: moves of results to the ranks that hold shards.
    """

    def __init__(
        self, shards: ShardMap, layers: Sequence[LayerSpec], workers: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.of_layer = of_layers(layers)
        workers_of = {
            param: workers[name] for name, params in self.of_layer.items() for param in params
        }
        self.gather = plan_gather(shards, workers_of)
        self.scatter = plan_scatter(shards, workers_of)


@dataclass
class FlatGradient:
    """The whole gradient of a parameter on one of its gradient workers.

    Attributes:
        values: flat elements.
        is_raw: True if the gradient is raw, see "Raw gradients" at the top of this file.
        is_copy: True if ``values`` was put together from several shards; False if it is DeepSpeed's
            own memory.
    """

    values: Tensor
    is_raw: bool
    is_copy: bool


class Gradients:
    """Whole gradients of a rank's layers: layer name -> fp32 [O, I] as it will be applied. Each is
    taken once: a step has a layer's gradient in memory, or its result.

    A tensor may be DeepSpeed's own memory, which only the exchange may write to.

    Args:
        matrices: layer name -> (matrix [O, I], factor by which it is still to be multiplied).
        copies: names of layers whose matrices are not DeepSpeed's own memory.
    """

    def __init__(
        self, matrices: Mapping[str, tuple[Tensor, Tensor | None]], copies: Collection[str] = ()
    ) -> None:
        self._matrices = dict(matrices)
        self._copies = copies

    def __contains__(self, name: str) -> bool:
        return name in self._matrices

    def __getitem__(self, name: str) -> Tensor:
        matrix_OI, factor = self._matrices[name]
        return matrix_OI.float() if factor is None else scaled(matrix_OI, factor)

    def is_copy(self, name: str) -> bool:
        """Return whether the caller may overwrite the gradient that it takes."""
        matrix_OI, factor = self._matrices[name]
        return name in self._copies or factor is not None or matrix_OI.dtype is not torch.float32

    def pop(self, name: str) -> Tensor:
        """Return a layer's gradient, and forget it."""
        matrix_OI = self[name]
        del self._matrices[name]
        return matrix_OI


class GradientExchange:
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' workers, and
    results back.

    A step calls :meth:`begin`, sends :attr:`gather_part`, takes the :meth:`gathered` gradients,
    puts a result for each, sends :meth:`scatter_part`, and writes what arrived.

    Args:
        workers: layer name -> ranks of its gradient workers.
        dtypes: (dtype of gradients, dtype of results) on the wire.

    Attributes:
        owned: layers that this rank is a gradient worker of.
        params: layer name -> its parameters.
        shards: parameter -> the shards of it on this rank.
        sent: parameter -> the spans of its result that this rank sends to other ranks.
        gradients: this rank's shards -> views of their gradients, which results overwrite.
    """

    def __init__(
        self,
        layout: ShardLayout,
        layers: Sequence[LayerSpec],
        workers: Mapping[str, tuple[int, ...]],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.layout = layout
        self.rank = layout.rank
        self.device = layout.engine.device
        self.plan = ExchangePlan(layout.shards, layers, workers)
        gather_dtype, self.scatter_dtype = dtypes
        self.owned = tuple(layer for layer in layers if layout.rank in workers[layer.name])
        self.params = {
            name: [*map(layout.param_of, params)] for name, params in self.plan.of_layer.items()
        }
        self.gradients: dict[Shard, Tensor] = {}
        self._layer_of = {
            param: name for name, params in self.plan.of_layer.items() for param in params
        }
        self._shard_at = {(shard.param, shard.start): shard for shard in layout.own}
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
        self._outbox.clear()  # a step that raised may have left something
        self.gradients = self.layout.gradients()

    # gradients to their workers

    def _to_wire(self, move: Move) -> Tensor:
        return self._as_sent(self._shard_at[move.param, move.start])

    def _as_sent(self, shard: Shard) -> Tensor:
        """Return a shard's gradient as it travels: raw, or as it will be applied."""
        layout = self.layout
        gradient = self.gradients[shard]
        if layout.seam.factor is None:
            return gradient
        is_raw = layout.raw(shard)
        if layout.sends_raw and not is_raw:
            return scaled(gradient.to(self.device), layout.seam.inverse)
        if is_raw and not layout.sends_raw:
            return scaled(gradient.to(self.device), layout.seam.factor)
        return gradient

    def gathered(self, received: Arrivals) -> Gradients:
        """Return the whole gradients of :attr:`owned`."""
        arrivals: dict[int, Arrivals] = {}
        for move, values in received:
            arrivals.setdefault(move.param, []).append((move, values))
        matrices = {}
        copies = set()
        for layer in self.owned:
            params = self.plan.of_layer[layer.name]
            flats = [self._flat(param, arrivals.get(param, [])) for param in params]
            matrices[layer.name] = self._matrix(layer, flats)
            if all(flat.is_copy for flat in flats):
                copies.add(layer.name)
        return Gradients(matrices, copies)

    def _flat(self, param: int, arrivals: Arrivals) -> FlatGradient:
        """Return the whole gradient of a parameter: DeepSpeed's memory if this rank has all of it,
        else put together from this rank's shards and from what has arrived."""
        layout = self.layout
        shards = self.shards.get(param, [])
        numel = layout.shards.numels[param]
        if len(shards) == 1 and shards[0].numel == numel:
            values = self.gradients[shards[0]].to(self.device)
            return FlatGradient(values, layout.raw(shards[0]), is_copy=False)
        values = torch.empty(numel, dtype=layout.dtype, device=self.device)
        for shard in shards:
            values[shard.start : shard.start + shard.numel] = self._as_sent(shard)
        for move, piece in arrivals:
            values[move.start : move.start + move.numel] = piece
        is_raw = layout.sends_raw and layout.seam.factor is not None
        return FlatGradient(values, is_raw, is_copy=True)

    def _matrix(
        self, layer: LayerSpec, flats: Sequence[FlatGradient]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a layer's gradient [O, I], and the factor by which it is still to be multiplied.

        Args:
            flats: gradients of the weight and, if there is one, of the bias.
        """
        factor = self.layout.seam.factor
        all_raw = all(flat.is_raw for flat in flats)
        # of a weight and its bias, which may be in two groups, one alone may be raw
        weight, *bias = (
            scaled(flat.values, factor) if flat.is_raw and not all_raw else flat.values
            for flat in flats
        )
        # with a bias the matrix is a copy
        matrix_OI = LAYERS[layer.kind].matrix(weight, bias[0] if bias else None, layer.shape)
        if any(map(self.layout.lacks, self.params[layer.name])):
            # a layer is stepped as a whole or stands still
            matrix_OI = torch.zeros_like(matrix_OI)
        return matrix_OI, factor if all_raw else None

    # results to their shards

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        """Take in results, one matrix of the layer's shape for each layer.

        What belongs to shards on this rank is written there. What other ranks get is kept for
        :meth:`scatter_part`, in the dtype in which it travels. A parameter that was frozen since
        attach gets zeros.
        """
        shards: list[Shard] = []
        values: list[Tensor] = []
        for layer, matrix_OI in zip(layers, matrices, strict=True):
            indices, parameters = self.plan.of_layer[layer.name], self.params[layer.name]
            for param, parameter, flat in zip(
                indices, parameters, self.parts(layer, matrix_OI), strict=True
            ):
                if not parameter.requires_grad:
                    flat = torch.zeros_like(flat)
                for span in self.sent.get(param, ()):
                    self._outbox[param, span] = _cut_out(flat, span, self.scatter_dtype)
                if self._is_rounded(layer, param):
                    flat = flat.to(self.scatter_dtype)
                for shard in self.shards.get(param, ()):
                    shards.append(shard)
                    values.append(flat.narrow(0, shard.start, shard.numel))
        self._write(shards, values)

    def _is_rounded(self, layer: LayerSpec, param: int) -> bool:
        """Return whether a result is rounded on this rank as it is rounded when it travels. Without
        it, replicas would drift apart, and so would the copies of a layer that other
        tensor-parallel ranks work for."""
        is_replica = self.layout.replicated and param in self.sent
        is_copy = layer.copies > 1 and self.layout.world > 1
        return is_replica or is_copy

    def memory(self, layers: Sequence[LayerSpec]) -> Tensor | None:
        """Return the memory of these layers' gradients as one fp32 tensor [n, O, I], for the caller
        to write results to it instead of calling :meth:`put`. None if it is not one tensor, or if a
        result belongs elsewhere, too, or is not written as it is."""
        views = []
        for layer in layers:
            if not self._stays_in_place(layer):
                return None
            (shard,) = self.shards[self.plan.of_layer[layer.name][0]]
            views.append(LAYERS[layer.kind].matrix(self.gradients[shard], None, layer.shape))
        together = evenly_spaced(views)
        if (
            together is None
            or together.dtype is not torch.float32
            or together.device != self.device
        ):
            return None
        return together.flatten(1, -2)

    def _stays_in_place(self, layer: LayerSpec) -> bool:
        """Return whether a layer's result belongs where the layer's whole gradient lies, and
        nowhere else, and is written there as it is."""
        param, *bias = self.plan.of_layer[layer.name]
        shards = self.shards.get(param, [])
        if bias or len(shards) != 1 or shards[0].numel < self.layout.shards.numels[param]:
            return False
        if param in self.sent or layer.copies > 1:
            return False
        if self.layout.raw(shards[0]):
            return False
        return bool(self.params[layer.name][0].requires_grad)

    def scatter_part(self) -> MessagePart:
        """Return the message part with what other ranks get."""
        outbox = self._outbox
        return MessagePart(
            "results",
            self.plan.scatter,
            lambda move: outbox[move.param, (move.start, move.numel)],
            self.scatter_dtype,
        )

    def sent_off(self) -> None:
        """What other ranks get is in a message: free it."""
        self._outbox.clear()

    def write(self, received: Arrivals, scales: Mapping[str, Tensor] | None = None) -> None:
        """Write the results of other ranks' layers to where the inner optimizer will find them, and
        scale the results of all layers.

        Args:
            scales: layer name -> scalar by which the layer's result is multiplied, for all layers.
        """
        self._write(
            [self._shard_at[move.param, move.start] for move, _ in received],
            [values for _, values in received],
        )
        if scales is not None and self.gradients:
            self._scale(scales)
        self.gradients = {}  # DeepSpeed's step frees what they are views of

    def _scale(self, scales: Mapping[str, Tensor]) -> None:
        """Multiply the results on this rank, layer by layer."""
        by_device: dict[torch.device, list[Shard]] = {}  # with offload some may be on the host
        for shard, gradient in self.gradients.items():
            by_device.setdefault(gradient.device, []).append(shard)
        stacked = torch.stack([*scales.values()])
        for device, shards in by_device.items():
            of_layer = dict(zip(scales, stacked.to(device).unbind(), strict=True))
            torch._foreach_mul_(
                [self.gradients[shard] for shard in shards],
                [of_layer[self._layer_of[shard.param]] for shard in shards],
            )

    def _write(self, shards: Sequence[Shard], values: list[Tensor]) -> None:
        """Write values to this rank's shards, divided by what DeepSpeed will still multiply them
        by. The list may change."""
        if not shards:
            return
        for index, shard in enumerate(shards):
            if self.layout.raw(shard):
                values[index] = scaled(values[index], self.layout.seam.inverse)
        torch._foreach_copy_([self.gradients[shard] for shard in shards], values)

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """Return a layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """Return the index of the optimizer's parameter group for each parameter of a layer."""
        return tuple(self.layout.group_index(param) for param in self.params[layer.name])


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return x * factor in fp32. A factor without dimensions would not promote 16 bits to fp32; one
    with a dimension does."""
    assert factor is not None
    return x * factor.view(1)


def _cut_out(flat: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """Return a span of a tensor that does not keep the rest of it in memory: a copy, unless the
    span is the whole tensor and has this dtype already."""
    part = flat.narrow(0, *span)
    return part.to(dtype, copy=len(part) < len(flat))
