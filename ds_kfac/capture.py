"""Hooks on the layers: batch sums of a a^T and g g^T, only on the micro-steps that need them.

A is added in the forward hook, G when the gradient of the output arrives. The gradient is taken by a prehook on
the output's grad_fn, because a tensor hook would run before DeepSpeed divides an engine output's gradient by the
accumulation steps, and a full backward hook breaks with in-place activations. An in-place activation also replaces
the grad_fn of a view, which the output of a Linear with bias is; the node of the viewed tensor stays.

Activation checkpointing runs a forward twice. Reentrant: the first run has gradients disabled and is passed over.
Non-reentrant: the first run counts; the recomputation's graph never gets a gradient, so it must not count A. Hence
a forward inside a backward adds A only once its gradient arrives.

torch.compile traces the hooks up to their first condition, which is all that steps without capture have of them.

With a Monte-Carlo Fisher the gradients of the true loss are passed over; those of a sampled loss are fed in, for the
calls that :attr:`Capture.pending` lists.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ds_kfac.batch_info import BatchInfo, ReadBatch
from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import LAYERS
from ds_kfac.rows import RowRule, gradient_rows, input_rows
from ds_kfac.shared_inputs import SharedInputs


@dataclass(frozen=True)
class BatchSum:
    """A sum over rows; views of a bucket, added to in place.

    Attributes:
        sum_P: fp32, packed sum of outer products.
        count: fp32 scalar: of A its rows (uses of the layer times loss terms), of G loss terms.
    """

    sum_P: Tensor
    count: Tensor


@dataclass(frozen=True)
class UseSums:
    """Where the rows of one use of a layer go, this step; None where nothing is due."""

    A: BatchSum | None
    G: BatchSum | None

    def having(self, side: str, sum_: BatchSum) -> "UseSums":
        return replace(self, **{side: sum_})


@dataclass(frozen=True)
class Call:
    """One call of a module whose output gradient is still to come.

    Attributes:
        edge: where in the graph its output's gradient arrives, maybe flattened.
        shape: of the output, with its examples and positions.
        x: its input; kept only where it is needed with the gradient, so that checkpointing can free it.
        input_too: whether A is added with the gradient, because the call was a recomputation.
    """

    layer: LayerSpec
    use: int
    module: nn.Module
    info: BatchInfo
    edge: GradientEdge
    shape: torch.Size
    x: Tensor | None
    input_too: bool


class Capture:
    """Installs the hooks; they return at once unless :attr:`active`.

    Args:
        model: holds the layers.
        layers: what :func:`ds_kfac.scan.scan` found.
        allocate: called at the first rows of a step, gives zeroed :class:`UseSums` per layer name and use.
        fallback_seed: the scale of a backward that nobody announced by :meth:`begin_backward`.
        rule: how rows are made.
        inputs: told of every input of a captured call, to find and verify layers that share theirs.
        stage: context in which rows are added, for timings.
        sampled: whether G comes from a sampled loss instead of the true one.
        info_of: a micro-batch's information -> that of a module's call in it, where they differ.

    Attributes:
        read_batch: tells the rows that count from the model's arguments.
        pending: calls of this micro-batch without gradients yet; filled only if ``sampled``.
        on_rows: called with (layer, use, side) after rows were added; set your own.
        turn: counts the steps, moves the sub-sample.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerSpec],
        allocate: Callable[[], Mapping[str, Sequence[UseSums]]],
        fallback_seed: Callable[[], Tensor | float],
        *,
        rule: RowRule | None = None,
        inputs: SharedInputs | None = None,
        stage: Callable[[], AbstractContextManager[None]] = nullcontext,
        sampled: bool = False,
        read_batch: ReadBatch | None = None,
        info_of: Callable[[str, BatchInfo], BatchInfo] | None = None,
    ) -> None:
        self.active = False
        self.rule, self.sampled, self.turn = rule or RowRule(), sampled, 0
        self.read_batch: ReadBatch = read_batch or (lambda arguments, keywords: BatchInfo())
        self.pending: list[Call] = []
        self.inputs = inputs or SharedInputs()
        self.on_rows: Callable[[str, int, str], None] = lambda layer, use, side: None
        self._stage = stage
        self._allocate, self._fallback_seed = allocate, fallback_seed
        self._sums: Mapping[str, Sequence[UseSums]] | None = None
        self._seed: Tensor | float | None = None
        self._info, self._info_of = BatchInfo(), info_of or (lambda module, info: info)
        self._terms: dict[tuple[str, int], int] = {}  # use -> loss terms already counted in this micro-batch
        self.called: set[str] = set()
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)]
        for layer in layers:
            for index, use in enumerate(layer.uses):
                module = model.get_submodule(use.module)
                hook = self._forward_hook(layer, index)
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False

    def begin_backward(self, seed: Tensor) -> None:
        """The gradient that reached the user's loss: by what every output gradient is scaled from here on."""
        self._seed = seed.detach().float()

    def end_backward(self) -> None:
        """Close the micro-batch: the next rows are new loss terms, not another use of the same ones."""
        self._seed = None
        self._terms.clear()
        self.pending.clear()
        self.inputs.end_batch()

    def take(self) -> Mapping[str, Sequence[UseSums]] | None:
        """The sums since the last call, None if no layer ran; forgets them."""
        sums, self._sums = self._sums, None
        self.end_backward()
        return sums

    def add_sampled(self, gradients: Iterable[Tensor | None], seed: Tensor | float) -> None:
        """Gradients of the sampled loss, times ``seed``, for the calls in :attr:`pending`; None where unused."""
        self._seed = seed
        for call, gradient in zip(self.pending, gradients, strict=True):
            if gradient is not None:
                self._add_gradient(call, gradient)
        self.end_backward()

    @property
    def info(self) -> BatchInfo:
        """Of the micro-batch that was last put through the model."""
        return self._info

    def _begin_forward(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if module.training and self.active:
            self._begin_batch(arguments, keywords)

    @torch.compiler.disable
    def _begin_batch(self, arguments: tuple, keywords: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._terms or self.pending:  # a loss.backward() that nobody closed
            self.end_backward()
        self._info = self.read_batch(arguments, keywords)

    def _forward_hook(self, layer: LayerSpec, index: int) -> Callable[..., None]:
        kind = LAYERS[layer.uses[index].kind]

        def hook(module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
            if module.training and self.active and torch.is_grad_enabled():
                capture(module, inputs, named, output)

        @torch.compiler.disable
        def capture(module: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
            if isinstance(output, tuple):  # Megatron's linears return their bias too
                output = output[0]
            if not output.requires_grad:
                return
            recomputing = torch._C._current_graph_task_id() != -1
            if recomputing and self.sampled:  # the first run's calls are those that are sampled
                return
            x = inputs[0] if inputs else next(iter(named.values()))
            self.inputs.see(layer.name, x)
            self.called.add(layer.name)
            x, sums = x.detach(), self._use_sums(layer, index)
            with_gradient = recomputing or kind.needs_gradients
            info = self._info_of(layer.uses[index].module, self._info)
            if not with_gradient and sums.A is not None:
                self._add_input(layer, index, module, x, info, sums.A)
            if sums.G is None and not (with_gradient and sums.A is not None):  # its gradients are not asked for
                return
            origin = _origin(output)
            assert origin.grad_fn is not None  # output.requires_grad
            edge = GradientEdge(origin.grad_fn, origin.output_nr)
            input_too = recomputing and not kind.needs_gradients
            x = x if with_gradient else None
            call = Call(layer, index, module, info, edge, output.shape, x, input_too)
            if self.sampled:
                self.pending.append(call)
            else:
                edge.node.register_prehook(lambda gradients: self._on_gradient(call, gradients[edge.output_nr]))

        return hook

    def _on_gradient(self, call: Call, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        sum_A = self._use_sums(call.layer, call.use).A
        if call.input_too and call.x is not None and sum_A is not None:
            self._add_input(call.layer, call.use, call.module, call.x, call.info, sum_A)
        self._add_gradient(call, gradient)

    def _use_sums(self, layer: LayerSpec, index: int) -> UseSums:
        if self._sums is None:
            self._sums = self._allocate()
        uses = self._sums.get(layer.name)
        return UseSums(None, None) if uses is None else uses[index]

    @torch.no_grad()
    def _add_input(
        self, layer: LayerSpec, index: int, module: nn.Module, x: Tensor, info: BatchInfo, sum_A: BatchSum
    ) -> None:
        use = layer.uses[index]
        with self._stage():
            tensor = LAYERS[use.kind].input_rows(module, x)
            assert tensor is not None  # the type does not wait for gradients
            rows = input_rows(tensor, info.rows, self.rule, dim=use.A.dim, turn=self.turn)
            use.A.accumulate_(sum_A.sum_P, rows.x, ones_column=rows.counts_R1 if use.bias else None)
            sum_A.count.add_(rows.count)
        self.on_rows(layer.name, index, "A")

    @torch.no_grad()
    def _add_gradient(self, call: Call, gradient: Tensor) -> None:
        """Rows of M g-hat / seed: the gradient of each loss term, M of them averaged in the loss.

        fp32 rows are unscaled before the product: the square of a gradient scaled by 2^16 may overflow. Rows in 16
        bits go as they are, the square of M / seed comes after: fp16 squares stay below 2^32, bf16 is not scaled.
        """
        use, sums = call.layer.uses[call.use], self._use_sums(call.layer, call.use)
        seed = self._fallback_seed() if self._seed is None else self._seed
        with self._stage():
            tensors = LAYERS[use.kind].gradient_rows(call.module, call.x, gradient.view(call.shape))
            if call.layer.rows is not None and tensors[1] is not None:
                tensors = tensors[0], tensors[1][..., slice(*call.layer.rows)]
            new_terms: Tensor | int = 0
            for tensor, side, sum_ in zip(tensors, (use.A, use.G), (sums.A, sums.G), strict=True):
                if tensor is None or sum_ is None:
                    continue
                rows, terms, factor = gradient_rows(tensor, call.info.rows, self.rule, turn=self.turn)
                told = call.info.terms(weight_sharing=self.rule.weight_sharing)
                terms = terms if told is None else told
                divisor = terms if call.info.divisor is None or self.sampled else call.info.divisor
                scale: Tensor | float = factor
                if rows.dtype == torch.float32:
                    rows = rows * (divisor / seed)
                else:
                    scale = factor * (divisor / seed) ** 2
                side.accumulate_(sum_.sum_P, rows, scale=scale)
                new_terms = self._new_terms(call, terms)
                sum_.count.add_(new_terms)
        for tensor, sum_, which in zip(tensors, (sums.A, sums.G), "AG", strict=True):
            if tensor is not None and sum_ is not None:
                self.on_rows(call.layer.name, call.use, which)

    def _new_terms(self, call: Call, terms: Tensor | int) -> Tensor | int:
        """Loss terms that this micro-batch has not counted yet: a second use of a layer adds rows, not terms."""
        key = (call.layer.name, call.use)  # rows of A and of G are the same terms, and only one of both is made here
        counted = self._terms.get(key, 0)
        if isinstance(terms, Tensor):  # told by the batch, the same for every call
            self._terms[key] = 1
            return 0 if counted else terms
        self._terms[key] = max(counted, terms)
        return max(0, terms - counted)


def _origin(output: Tensor) -> Tensor:
    """The tensor that ``output`` is a reshaped view of, or ``output``."""
    base = output._base
    return base if base is not None and base.numel() == output.numel() and base.grad_fn is not None else output
