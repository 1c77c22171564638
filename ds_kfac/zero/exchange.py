"""Gradients of whole layers to their gradient workers, and the preconditioned ones back to every shard.

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
from ds_kfac.update.rotation import AT_ONCE
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.shards import Shard, ShardMap, of_layers, plan_gather, plan_scatter

Shards = dict[tuple[int, int], Tensor]
"""(parameter, start) -> flat values."""
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


class GradientExchange:
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' workers.

    Args:
        dtypes: on the wire: of gradients to the workers, and of results back.

    Attributes:
        owned: layers this rank is a gradient worker of.
        shards: parameter -> the slices of it that this rank holds.
        sent: parameter -> the slices of its result that this rank sends to others.
        staying: layers of :attr:`owned` of which every gradient lies here, and whose results take its place.
    """

    def __init__(
        self, layout: ShardLayout, layers: Sequence[LayerSpec], workers: Mapping[str, tuple[int, ...]],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:  # fmt: skip
        self.layout, self.rank, self.device = layout, layout.rank, layout.engine.device
        self.plan = ExchangePlan(layout.shards, layers, workers)
        gather_dtype, self.scatter_dtype = dtypes
        self.owned = tuple(layer for layer in layers if layout.rank in workers[layer.name])
        self._here = {(shard.param, shard.start): shard for shard in layout.shards.on(self.rank)}
        self.shards: dict[int, list[Shard]] = {}
        for shard in self._here.values():
            self.shards.setdefault(shard.param, []).append(shard)
        # pieces of gradients to their workers, still carrying the loss scale
        self.gather_part = MessagePart("gradients", self.plan.gather, self._read, gather_dtype)
        self.params = {name: [*map(layout.param_of, params)] for name, params in self.plan.of_layer.items()}
        self.sent: dict[int, set[Span]] = {}
        for move in self.plan.scatter.moves:
            if move.source == self.rank:
                self.sent.setdefault(move.param, set()).add((move.start, move.numel))
        self.staying = {layer.name for layer in self.owned if self._stays(layer)}
        self._views: dict[Shard, Tensor] = {}

    def _stays(self, layer: LayerSpec) -> bool:
        whole = self.layout.shards.numels
        here = all([shard.numel for shard in self.shards.get(param, ())] == [whole[param]] and param not in self.sent
                   for param in self.plan.of_layer[layer.name])  # fmt: skip
        return here and self.layout.in_place and (layer.copies == 1 or self.layout.world == 1)

    def view(self, shard: Shard) -> Tensor:
        """A shard's gradient, looked up once a step: ``layout.read`` takes the host microseconds."""
        if (view := self._views.get(shard)) is None:
            view = self._views[shard] = self.layout.read(shard)
        return view

    def outbox(self) -> "Outbox":
        """For the results of a step."""
        return Outbox(self)

    def gathered(self, received: Arrivals) -> dict[str, Tensor]:
        """Whole gradients of :attr:`owned`, [O, I] on the device, in the dtype in which they are stored. Where a whole
        parameter lies here they are DeepSpeed's own memory: write to them through the outbox alone."""
        self._views.clear()  # of a step that raised
        self.layout.staged.clear()
        flats: dict[int, Tensor] = {}
        for param in (param for layer in self.owned for param in self.plan.of_layer[layer.name]):
            shards, numel = self.shards.get(param, []), self.layout.shards.numels[param]
            if len(shards) == 1 and shards[0].numel == numel:  # nothing to put together
                flats[param] = self.view(shards[0]).to(self.device)
                continue
            flats[param] = torch.empty(numel, dtype=self.layout.dtype, device=self.device)
            for shard in shards:
                flats[param][shard.start : shard.start + shard.numel] = self.layout.read(shard)
        for move, values in received:
            flats[move.param][move.start : move.start + move.numel] = values
        matrices = {}
        for layer in self.owned:
            weight, *bias = (flats.pop(param) for param in self.plan.of_layer[layer.name])
            # with a bias the matrix is a copy
            matrices[layer.name] = LAYERS[layer.kind].matrix(weight, bias[0] if bias else None, layer.shape)
        return matrices

    def write(self, outbox: "Outbox", received: Arrivals, scales: Mapping[str, Tensor]) -> None:
        """Put results where the engine's optimizer will find them.

        Args:
            outbox: results of this rank's layers, overwritten.
            received: those of others'.
            scales: layer name -> scalar to multiply its result by; 1 if absent.
        """
        gradients, replacements = list[Tensor](), list[Tensor]()
        for layers, x, matrices in outbox.groups:
            if layers[0].name in scales:  # then all are, but their scales may differ
                rows = x.view(len(layers), -1)  # by a vector: by a scalar the product would be in 16 bits
                torch.mul(rows, torch.stack([scales[layer.name] for layer in layers])[:, None], out=rows)
            for layer, matrix_OI in zip(layers, matrices, strict=True):
                for param, flat in zip(self.plan.of_layer[layer.name], self.parts(layer, matrix_OI), strict=True):
                    gradients.append(self.view(self.shards[param][0]))
                    replacements.append(flat)
        if gradients:
            torch._foreach_copy_(gradients, replacements)
        results = {**outbox.here, **{(move.param, move.start): values for move, values in received}}
        of_param = {param: scales.get(name) for name, params in self.plan.of_layer.items() for param in params}
        # fp32 results that lie in place, by their scale: one launch for all of them
        of_scale: dict[int, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        for place in list(results):
            scale, values, shard = of_param[place[0]], results.pop(place), self._here[place]
            if not self.layout.in_place:
                self.layout.write(shard, values.float() if scale is None else values.float().mul_(scale))
                continue
            whole = self.view(shard)
            if whole.dtype is torch.float32 and scale is not None:
                _, sources, targets = of_scale.setdefault(id(scale), (scale, [], []))
                sources.append(values)
                targets.append(whole)
                continue
            for part, into in zip(values.split(AT_ONCE), whole.split(AT_ONCE), strict=True):
                if scale is not None and into.is_cuda:  # no copy; by a scalar the product would be in 16 bits
                    torch.mul(part, scale.view(1), out=into)
                else:
                    into.copy_(part if scale is None else part.float().mul_(scale))
        for scale, sources, targets in of_scale.values():
            elsewhere = [(x, y) for x, y in zip(targets, sources, strict=True) if x.data_ptr() != y.data_ptr()]
            if elsewhere:
                torch._foreach_copy_([x for x, _ in elsewhere], [y for _, y in elsewhere])
            torch._foreach_mul_(targets, scale)
        self._views.clear()  # DeepSpeed's step frees what they are of

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """A layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """The optimizer's parameter group of each of the layer's parameters."""
        return tuple(self.layout.group_index(param) for param in self.params[layer.name])

    def _read(self, move: Move) -> Tensor:
        return self.layout.read(self._here[move.param, move.start])


class Outbox:
    """Preconditioned gradients of this rank's layers: what other ranks get, in wire dtype, until it is in a message;
    and what stays here, which lies where the gradient was if the layout is :attr:`ShardLayout.in_place`.

    Attributes:
        here: what stays here.
        groups: what stays here, too, of layers that have their results in one tensor of theirs: these layers, the
            tensor, and its parts.
        part: what other ranks get.
        release: to be called when ``part`` is in a message: frees it.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self.exchange = exchange
        self.here: Shards = {}
        self.groups: list[tuple[Sequence[LayerSpec], Tensor, Sequence[Tensor]]] = []
        self._sent = sent = dict[tuple[int, Span], Tensor]()
        self.release = sent.clear
        # without self: a circle of references would keep a step's results until the next garbage collection
        self.part = MessagePart(
            "results", exchange.plan.scatter, lambda m: sent[m.param, (m.start, m.numel)], exchange.scatter_dtype
        )

    def add(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor], together: Tensor | None = None) -> None:
        """Take results in. Their gradients may be overwritten by them.

        Args:
            matrices: of each layer, of its shape. A parameter that was frozen since attach gets zeros.
            together: the tensor of which they are all parts, in the dtype in which they are to be stored, if it stays
                as it is until they are written; it is overwritten then.
        """
        exchange, layout = self.exchange, self.exchange.layout
        if together is not None and all(map(self._takes_whole, layers)):
            self.groups.append((layers, together, matrices))
            return
        targets, sources = list[Tensor](), list[Tensor]()
        for layer, matrix_OI in zip(layers, matrices, strict=True):
            # rounded as it arrives elsewhere: else replicas, and copies that another rank works for, would drift apart
            copied = layer.copies > 1 and layout.world > 1
            indices, parameters = exchange.plan.of_layer[layer.name], exchange.params[layer.name]
            for param, parameter, flat in zip(indices, parameters, exchange.parts(layer, matrix_OI), strict=True):
                if not parameter.requires_grad:
                    flat = torch.zeros_like(flat)
                for span in exchange.sent.get(param, ()):
                    self._sent[param, span] = _cut_out(flat, span, exchange.scatter_dtype)
                for shard in exchange.shards.get(param, ()):
                    span = shard.start, shard.numel
                    if (copied or layout.replicated) and (param, span) in self._sent:
                        self.here[param, shard.start] = self._sent[param, span]
                    elif layout.in_place and not copied:
                        self.here[param, shard.start] = target = exchange.view(shard)
                        targets.append(target)
                        sources.append(flat.narrow(0, *span))
                    else:
                        dtype = exchange.scatter_dtype if copied else torch.float32
                        self.here[param, shard.start] = _cut_out(flat, span, dtype)
        if targets:
            torch._foreach_copy_(targets, sources)

    def claim(self, layers: Sequence[LayerSpec]) -> Tensor | None:
        """[n, O, I], the memory of these layers' gradients, for the caller to write their results to in place of adding
        them. None if it is not one tensor, or not where results stay."""
        exchange = self.exchange
        params = [param for layer in layers for param in exchange.plan.of_layer[layer.name]]
        if len(params) > len(layers) or not all(map(self._takes_whole, layers)):
            return None
        shards = [exchange.shards[param][0] for param in params]
        views = {(shard.param, shard.start): exchange.view(shard) for shard in shards}
        first, pairs = next(iter(views.values())), zip(layers, views.values(), strict=True)
        together = evenly_spaced([LAYERS[layer.kind].matrix(view, None, layer.shape) for layer, view in pairs])
        if together is None or together.data_ptr() != first.data_ptr() or together.device != exchange.device:
            return None
        self.here |= views
        return together.flatten(1, -2)

    def _takes_whole(self, layer: LayerSpec) -> bool:
        exchange = self.exchange
        return layer.name in exchange.staying and all(p.requires_grad for p in exchange.params[layer.name])


def _cut_out(flat: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """A slice that does not keep the whole tensor in memory: a copy, unless it is all of it and of that dtype."""
    part = flat.narrow(0, *span)
    return part.to(dtype, copy=len(part) < len(flat))
