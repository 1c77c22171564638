"""Gradients of whole layers to their gradient workers, and the workers' results back to every shard."""

from collections.abc import Mapping, Sequence

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.comm.message import Arrivals, MessagePart, Move
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.update.rotation import AT_ONCE
from ds_kfac.update.state import LayerState, MomentUpdate
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.shards import Shard, ShardMap, of_layers, plan_gather, plan_scatter

Shards = dict[tuple[int, int], Tensor]
"""(parameter, start) -> flat values."""
Piece = tuple[int, int]
"""Of a parameter: its start, and its elements."""


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
    """Moves gradients between a layout's shards and matrices [O, I] on the layers' workers. ``dtypes``: on the wire, of
    gradients to the workers and of results back.

    Attributes:
        owned: layers this rank is a gradient worker of.
    """

    def __init__(
        self, layout: ShardLayout, layers: Sequence[LayerSpec], workers: Mapping[str, tuple[int, ...]],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:  # fmt: skip
        self.layout, self.rank, self.device = layout, layout.rank, layout.engine.device
        self.plan = ExchangePlan(layout.shards, layers, workers)
        gather_dtype, self.scatter_dtype = dtypes
        self.owned = tuple(layer for layer in layers if layout.rank in workers[layer.name])
        self._mine = {(shard.param, shard.start): shard for shard in layout.shards.on(self.rank)}
        self.shards: dict[int, list[Shard]] = {}
        for shard in self._mine.values():
            self.shards.setdefault(shard.param, []).append(shard)
        # pieces of gradients to their workers, still carrying the loss scale
        self.gather_part = MessagePart("gradients", self.plan.gather, self._read, gather_dtype)
        self.params = {name: [layout.param_of(piece) for piece in own] for name, own in self.plan.of_layer.items()}
        self.sent: dict[int, set[Piece]] = {}
        for move in self.plan.scatter.moves:
            if move.source == self.rank:
                self.sent.setdefault(move.param, set()).add((move.start, move.numel))

    def outbox(self) -> "Outbox":
        """For the results of a step."""
        return Outbox(self)

    def gathered(self, received: Arrivals) -> dict[str, Tensor]:
        """Own layers' whole gradients, [O, I] on the device, in the dtype in which they are stored."""
        flats: dict[int, Tensor] = {}
        for param in (param for layer in self.owned for param in self.plan.of_layer[layer.name]):
            own, numel = self.shards.get(param, []), self.layout.shards.numels[param]
            if len(own) == 1 and own[0].numel == numel:  # nothing to put together
                flats[param] = self.layout.read(own[0]).to(self.device)
                continue
            flats[param] = torch.empty(numel, dtype=self.layout.dtype, device=self.device)
            for shard in own:
                flats[param][shard.start : shard.start + shard.numel] = self.layout.read(shard)
        for move, values in received:
            flats[move.param][move.start : move.start + move.numel] = values
        matrices = {}
        for layer in self.owned:
            pieces = [flats.pop(param) for param in self.plan.of_layer[layer.name]]
            bias = pieces[1] if layer.bias else None  # with it a matrix is a copy
            matrices[layer.name] = LAYERS[layer.kind].matrix(pieces[0], bias, layer.shape)
        return matrices

    def write(self, own: Shards, received: Arrivals, scales: Mapping[str, Tensor]) -> None:
        """Put own and received results where the engine's optimizer will find them; both are given up. ``scales``:
        layer name -> scalar to multiply its result by; layers that are missing stay as they are."""
        pieces = {**own, **{(move.param, move.start): values for move, values in received}}
        of_param = {param: scales.get(name) for name, params in self.plan.of_layer.items() for param in params}
        together: dict[int, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        for place in list(pieces):
            scale, values, shard = of_param[place[0]], pieces.pop(place), self._mine[place]
            if not self.layout.in_place:
                self.layout.write(shard, values.float() if scale is None else values.float().mul_(scale))
                continue
            whole = self.layout.read(shard)
            if whole.dtype is torch.float32 and scale is not None:
                _, results, places = together.setdefault(id(scale), (scale, [], []))
                results.append(values)
                places.append(whole)
                continue
            for part, into in zip(values.split(AT_ONCE), whole.split(AT_ONCE), strict=True):
                if scale is not None and into.is_cuda:  # no copy; by a scalar the product would be in 16 bits
                    torch.mul(part, scale.view(1), out=into)
                else:
                    into.copy_(part if scale is None else part.float().mul_(scale))
        for scale, results, places in together.values():
            arrived = [(x, y) for x, y in zip(places, results, strict=True) if x.data_ptr() != y.data_ptr()]
            if arrived:
                torch._foreach_copy_([x for x, _ in arrived], [y for _, y in arrived])
            torch._foreach_mul_(places, scale)

    @staticmethod
    def parts(layer: LayerSpec, matrix_OI: Tensor) -> tuple[Tensor, ...]:
        """A layer's matrix as flat tensors, one for each of its parameters."""
        return LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None)

    def group_indices(self, layer: LayerSpec) -> tuple[int, ...]:
        """The optimizer's parameter group of each of the layer's parameters."""
        return tuple(self.layout.group_index(param) for param in self.params[layer.name])

    def _read(self, move: Move) -> Tensor:
        return self.layout.read(self._mine[move.param, move.start])


class Outbox:
    """Results of own layers, until they are sent: of each what others get, as it is sent, and what stays here, which
    lies where the gradient was if that is :attr:`ShardLayout.in_place`. A result itself is given up.

    Attributes:
        own: what stays here.
        packed: says that the part is in a message: what stays here is all that is still needed.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self.exchange = exchange
        self.own: Shards = {}
        self._sent = sent = dict[tuple[int, Piece], Tensor]()
        self.packed = sent.clear
        # to every rank that holds a shard of a result. Without self: a circle would keep a step's results
        self.part = MessagePart(
            "results", exchange.plan.scatter, lambda m: sent[m.param, (m.start, m.numel)], exchange.scatter_dtype
        )

    def add(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        """Results, fp32 [O, I], zero where a parameter was frozen since attach; their gradients are of no more use."""
        exchange, layout = self.exchange, self.exchange.layout
        places, results = list[Tensor](), list[Tensor]()
        parts = [
            (layer, *part)
            for layer, matrix_OI in zip(layers, matrices, strict=True)
            for part in zip(
                exchange.plan.of_layer[layer.name],
                exchange.params[layer.name],
                LAYERS[layer.kind].split(matrix_OI, has_bias=layer.bias is not None),
                strict=True,
            )
        ]
        for layer, param, parameter, flat in parts:
            if not parameter.requires_grad:
                flat = torch.zeros_like(flat)
            for place in exchange.sent.get(param, ()):
                self._sent[param, place] = _alone(flat, place, exchange.scatter_dtype)
            for shard in exchange.shards.get(param, ()):
                place = shard.start, shard.numel
                # as it arrives, or replicas, and copies of which another rank is the worker, would drift apart
                copied = layer.copies > 1 and layout.world > 1
                if (copied or layout.replicated) and (param, place) in self._sent:
                    self.own[param, shard.start] = self._sent[param, place]
                elif layout.in_place and not copied:
                    self.own[param, shard.start] = into = layout.read(shard)
                    places.append(into)
                    results.append(flat.narrow(0, *place))
                else:
                    dtype = exchange.scatter_dtype if copied else torch.float32
                    self.own[param, shard.start] = _alone(flat, place, dtype)
        if places:
            torch._foreach_copy_(places, results)


def _alone(flat: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    """Part of a tensor that does not keep the whole of it in memory; of all of it no copy."""
    part = flat.narrow(0, *piece)
    return part.to(dtype, copy=len(part) < len(flat))


class LocalResult:
    """What a rank computed for its own layers.

    Attributes:
        outbox: results, until they are sent.
        states: layer name -> state after this step; new ones take the place of old ones.
        numbers: scalars that are summed over all ranks before :meth:`Direction.finish`.
        replaced: scalar, layers whose result was not finite.
        unprepared: layers that were stepped as without curvature because they have no eigenbasis or inverse.
        unused: scalar, layers whose gradient was exactly zero, where the direction asks.
        limited: scalar, layers whose gradient was scaled down for its running second moment.
        left_out: layer name -> bool scalar, whether its gradient was too large for its moments.
        moment_updates: gradients that go into moments of ``states`` once the step was applied.
        clip: factor that clipped the gradients in the results.
    """

    def __init__(self, states: dict[str, LayerState], exchange: GradientExchange) -> None:
        self.outbox, self.states = exchange.outbox(), states
        self.numbers: list[Tensor] = []
        self.replaced = self.unused = self.limited = torch.zeros((), device=exchange.device)
        self.unprepared = 0
        self.clip: Tensor | float = 1.0
        self.left_out: dict[str, Tensor] = {}
        self.moment_updates: list[MomentUpdate] = []

    def kept(self) -> dict[str, LayerState]:
        """``states``, now that the step was applied: they take its gradients in, where they have not yet."""
        while self.moment_updates:
            self.moment_updates.pop().apply()
        return self.states

    def counts(self, failed: int, unusual: Tensor | None) -> list[Tensor]:
        """What is summed over all layers in the order of :data:`ds_kfac.metrics.SUMMARY`.

        Args:
            failed: refreshes that failed here.
            unusual: [3], batches of factors here, see :data:`ds_kfac.step.messages.UNUSUAL`; None: none.
        """
        unprepared, failures = (self.replaced.new_full((), n) for n in (self.unprepared, failed))
        left_out = torch.zeros_like(self.replaced)
        if self.left_out:
            left_out = torch.stack(list(self.left_out.values())).sum(dtype=left_out.dtype)
        limited, *empty = self.replaced.new_zeros(3) if unusual is None else unusual.to(self.replaced.dtype)
        return [self.replaced, unprepared, failures, self.unused, left_out, self.limited + limited, *empty]


class Watch:
    """Warns of this rank's layers whose gradients were left out because moments could not have held them."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._seen = torch.zeros(len(self.names), device=device)
        self._said: set[str] = set()
        self._copy: HostCopy | None = None

    def step(self, flags: Mapping[str, Tensor], *, look: bool) -> None:
        """After a step that was applied, with flags (bool scalars) of none or of all layers. ``look``, now and then:
        say what an earlier look asked for, if it has arrived, and ask again."""
        if flags:
            self._seen = self._seen + torch.stack([flags[name] for name in self.names])
        if look and (self._copy is None or self._copy.done):
            counts = dict(zip(self.names, self._copy.tolist(), strict=True)) if self._copy else {}
            self._copy = HostCopy(self._seen)
            for name, count in counts.items():
                if not count or name in self._said:
                    continue
                self._said.add(name)
                logger.warning(
                    f"ds_kfac: gradients of {name} were left out, {int(count)} so far: of norm 1e15 and more "
                    "they are none, and Adam's moments would not get over them. Its weights were not touched in these "
                    'steps; "gradient_clipping" in the DeepSpeed config bounds them'
                )
