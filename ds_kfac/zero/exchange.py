"""Move gradients to the layers' gradient workers, and results back to the ranks that hold shards.

ZeRO gives a rank shards of flattened parameters, and a shard is usually not a whole matrix. So the
shards of a layer are sent to its gradient workers (the ranks that precondition the layer), which
assemble them into a matrix [O, I]. The results are sent back to the ranks that hold the shards.

Note: Raw gradients. A gradient is *raw* if DeepSpeed will multiply it by the seam's factor (the
    unscaling and clipping of this step) only after K-FAC's step. In one step the gradients of some
    parameter groups may be raw, while the gradients of other groups are not. All shards are sent in
    the same form. If :attr:`ShardLayout.sends_raw` is True, all shards are sent raw, because 16
    bits then hold them exactly. Otherwise all are sent multiplied by the factor. A result that
    overwrites a raw gradient is divided by the factor first.
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
    """Plan of all transfers between shards (the entries of a :class:`ShardMap`) and gradient
    workers. Creating it needs no communication.

    Args:
        workers: layer name -> ranks of the layer's gradient workers. If gradients are partitioned,
            each layer has a single gradient worker.

    Attributes:
        of_layer: layer name -> indices of the layer's parameters in ``shards``.
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
        is_raw: True if the gradient is raw, see "Raw gradients" above.
        is_copy: True if ``values`` is a new tensor, assembled from several shards; False if it is
            DeepSpeed's own memory.
    """

    values: Tensor
    is_raw: bool
    is_copy: bool


class Gradients:
    """The whole gradients of the layers that a rank preconditions, by layer name. Each gradient is
    an fp32 matrix [O, I], after unscaling and clipping.

    Take each gradient with :meth:`pop`, so that a step does not keep a layer's gradient and its
    result in memory at the same time. A gradient may be DeepSpeed's own memory, which only the
    exchange may write to.

    Args:
        matrices: layer name -> (matrix [O, I], factor by which the matrix must still be multiplied,
            or None).
        copies: names of the layers whose matrices are new tensors and not DeepSpeed's own memory.
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
        """Return whether the caller may overwrite the gradient of a layer."""
        matrix_OI, factor = self._matrices[name]
        return name in self._copies or factor is not None or matrix_OI.dtype is not torch.float32

    def pop(self, name: str) -> Tensor:
        """Return a layer's gradient, and drop this object's reference to it."""
        matrix_OI = self[name]
        del self._matrices[name]
        return matrix_OI


class GradientExchange:
    """Moves gradients from a layout's shards to matrices [O, I] on the layers' workers, and results
    back to the shards.

    In a step, the caller calls :meth:`begin`, sends :attr:`gather_part`, passes the arrivals to
    :meth:`gathered`, calls :meth:`put` with the results, sends :meth:`scatter_part`, and passes the
    arrivals to :meth:`write`.

    Args:
        workers: layer name -> ranks of its gradient workers.
        dtypes: (dtype of gradients, dtype of results) in messages between ranks.

    Attributes:
        worker_layers: layers for which this rank is a gradient worker.
        params: layer name -> the layer's parameters.
        shards: index of a parameter -> the shards of the parameter on this rank.
        sent: index of a parameter -> spans (first element, number of elements) of the parameter's
            result that this rank sends to other ranks.
        gradients: shard on this rank -> view of the shard's gradient, which the result overwrites.
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
        self.worker_layers = tuple(layer for layer in layers if layout.rank in workers[layer.name])
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
        """Look up where DeepSpeed keeps gradients in this step."""
        self._outbox.clear()  # a step that raised an error may have left results here
        self.gradients = self.layout.gradients()

    # gradients to their workers

    def _to_wire(self, move: Move) -> Tensor:
        return self._as_sent(self._shard_at[move.param, move.start])

    def _as_sent(self, shard: Shard) -> Tensor:
        """Return a shard's gradient in the form in which it is sent, see "Raw gradients" above."""
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
        """Return the whole gradients of the layers in :attr:`worker_layers`."""
        arrivals: dict[int, Arrivals] = {}
        for move, values in received:
            arrivals.setdefault(move.param, []).append((move, values))
        matrices = {}
        copies = set()
        for layer in self.worker_layers:
            params = self.plan.of_layer[layer.name]
            flats = [self._flat(param, arrivals.get(param, [])) for param in params]
            matrices[layer.name] = self._matrix(layer, flats)
            if all(flat.is_copy for flat in flats):
                copies.add(layer.name)
        return Gradients(matrices, copies)

    def _flat(self, param: int, arrivals: Arrivals) -> FlatGradient:
        """Return the whole gradient of a parameter. If this rank has all of the gradient in one
        shard, the result is a view of DeepSpeed's memory. Otherwise it is assembled from this
        rank's shards and from the shards that have arrived."""
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
        """Return a layer's gradient [O, I], and the factor by which it must still be multiplied, or
        None.

        Args:
            flats: gradients of the weight and, if there is one, of the bias.
        """
        factor = self.layout.seam.factor
        all_raw = all(flat.is_raw for flat in flats)
        # if weight and bias are in two parameter groups, one of them may be raw and the other not
        weight, *bias = (
            scaled(flat.values, factor) if flat.is_raw and not all_raw else flat.values
            for flat in flats
        )
        # if the layer has a bias, the matrix is a copy of both gradients
        matrix_OI = LAYERS[layer.kind].matrix(weight, bias[0] if bias else None, layer.shape)
        if any(map(self.layout.lacks, self.params[layer.name])):
            # if DeepSpeed leaves one parameter of a layer unchanged, the layer's other parameters
            # must not change either
            matrix_OI = torch.zeros_like(matrix_OI)
        return matrix_OI, factor if all_raw else None

    # results to their shards

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        """Take the results of several layers. Each result is a matrix with the shape of its layer.

        Elements that belong to shards on this rank are written to these shards. Elements for other
        ranks are kept for :meth:`scatter_part`, in the dtype in which they are sent. If a parameter
        was frozen after attach, its result is replaced by zeros.
        """
        shards: list[Shard] = []
        values: list[Tensor] = []
        for layer, matrix_OI in zip(layers, matrices, strict=True):
            indices = self.plan.of_layer[layer.name]
            parameters = self.params[layer.name]
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
        """Return whether this rank must round its own result to the dtype in which results are
        sent.

        Other ranks receive the rounded result. If this rank used the unrounded result, the ranks'
        replicas of a weight would drift apart, and so would the copies of a layer on different
        tensor-parallel ranks.
        """
        is_replica = self.layout.replicated and param in self.sent
        is_copy = layer.copies > 1 and self.layout.world > 1
        return is_replica or is_copy

    def memory(self, layers: Sequence[LayerSpec]) -> Tensor | None:
        """Return the memory of these layers' gradients as one fp32 tensor [n, O, I].

        The caller can write results to this tensor instead of calling :meth:`put`. Return None if
        the gradients do not form one such tensor, if another rank also needs a result, or if a
        result must be changed before it is written.
        """
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
        """Return whether a layer's result simply overwrites the layer's gradient. This is so if
        this rank has the whole gradient in one shard, no other rank needs the result, and the
        result need not be changed before it is written."""
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
        """Return the message part with the results for other ranks."""
        outbox = self._outbox
        return MessagePart(
            "results",
            self.plan.scatter,
            lambda move: outbox[move.param, (move.start, move.numel)],
            self.scatter_dtype,
        )

    def sent_off(self) -> None:
        """Free the results for other ranks. Call this method after they were copied to a
        message."""
        self._outbox.clear()

    def write(self, received: Arrivals, scales: Mapping[str, Tensor] | None = None) -> None:
        """Write the results that other ranks have sent to the memory from which the inner optimizer
        reads gradients. Then multiply every layer's result by its scale, if ``scales`` is given.

        Args:
            scales: dict from the name of every layer to the scalar by which the layer's result is
                multiplied; None: results stay as they are.
        """
        self._write(
            [self._shard_at[move.param, move.start] for move, _ in received],
            [values for _, values in received],
        )
        if scales is not None and self.gradients:
            self._scale(scales)
        self.gradients = {}  # views would keep memory alive that DeepSpeed's step frees

    def _scale(self, scales: Mapping[str, Tensor]) -> None:
        """Multiply each result on this rank by its layer's scale."""
        # with offload, some gradients may be on the host
        by_device: dict[torch.device, list[Shard]] = {}
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
        """Write values to this rank's shards. Values for raw gradients are divided by the factor
        first, because DeepSpeed will multiply them by the factor. May change the list
        ``values``."""
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
        """Return, for each parameter of a layer, the index of its parameter group in the
        optimizer."""
        return tuple(self.layout.group_index(param) for param in self.params[layer.name])


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return x * factor in fp32. First a dimension is added to ``factor``, because in torch a
    factor without dimensions does not promote a 16-bit x to fp32."""
    assert factor is not None
    return x * factor.view(1)


def _cut_out(flat: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """Return a span of a flat tensor in ``dtype``. The result is a copy, so that it does not keep
    the rest of the tensor in memory. If the span is the whole tensor and the dtype is the same, the
    result is a view."""
    part = flat.narrow(0, *span)
    return part.to(dtype, copy=len(part) < len(flat))
