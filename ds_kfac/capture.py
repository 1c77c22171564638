"""Hooks on the layers: batch sums of a a^T and g g^T, only on the micro-steps that need them.

A is summed in the forward hook and waits, a sum and not the inputs, for the gradient of the layer's output; both are
counted when it arrives. What never gets one is never counted: a forward whose backward is skipped, or stopped by an
exception before it reached the layer.

A gradient counts in the engine's own backward only, see ``own_backward.py``.

Activation checkpointing runs a forward twice. Reentrant: the first run has gradients disabled and is passed over.
Non-reentrant: the first run counts; the recomputation's graph never gets a gradient, so it must not count A. Hence
a forward inside a backward sums A only once its gradient arrives.

torch.compile traces the hooks up to their first condition, which is all that steps without capture have of them.

With a Monte-Carlo Fisher the gradients of the true loss are passed over; those of a sampled loss are fed in, for the
calls that :attr:`Capture.pending` lists.

No exception leaves a hook: it would stop one rank in a backward that the others finish.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.batch_info import BatchInfo, ReadBatch
from ds_kfac.calls import AskedCall, BatchSum, Call, Forward, UseSums, edge_of, is_trained, no_graph, on_gradient
from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import LAYERS
from ds_kfac.own_backward import OwnBackward
from ds_kfac.rows import RowRule, gradient_rows, input_rows
from ds_kfac.shared_inputs import SharedInputs


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
        on_rows: called with (layer, use, sides) when a call's rows have come; set your own.
        gone: whether the sums of a (layer, use, side) have left, so that its rows are dropped; set your own.
        counted, strangers: calls since the last step whose gradients came in the engine's own backward, and in others.
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
        self.pending: list[AskedCall] = []
        self.inputs = inputs or SharedInputs()
        self.on_rows: Callable[[str, int, str], None] = lambda layer, use, sides: None
        self.gone: Callable[[str, int, str], bool] = lambda layer, use, side: False
        self.counted = self.strangers = 0
        self._own, self._forward = OwnBackward(), Forward()
        self._arrived: list[Call] = []  # in this backward, with an input to be released after it
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

    def begin_own(self) -> None:
        """The engine's own backward begins; until :meth:`end_own`."""
        self._own.begin()

    def end_own(self, *, retain_graph: bool = False) -> None:
        """It has ended, maybe by an exception. Closes the micro-batch.

        Args:
            retain_graph: whether a second backward through the graph may follow.
        """
        self._own.end()
        if retain_graph:
            self._arrived.clear()
        self.end_backward()

    def begin_backward(self, seed: Tensor) -> None:
        """The gradient that reached the user's loss: by what every output gradient is scaled from here on."""
        self._seed = seed.detach().float()

    def end_backward(self) -> None:
        """Close the micro-batch: the next rows are new loss terms, not another use of the same ones."""
        self._seed = None
        self._terms.clear()
        self.pending.clear()
        for call in self._arrived:
            call.x = None
        self._arrived.clear()
        self.inputs.end_batch()

    def take(self) -> Mapping[str, Sequence[UseSums]] | None:
        """The sums since the last call, None if no layer ran; forgets them."""
        sums, self._sums = self._sums, None
        self._forward, self.counted, self.strangers = Forward(), 0, 0
        self.end_backward()
        return sums

    def add_sampled(self, gradients: Iterable[Tensor | None], seed: Tensor | float) -> None:
        """Gradients of the sampled loss, times ``seed``, for the calls in :attr:`pending`; None where unused."""
        self._seed = seed
        for call, gradient in zip(self.pending, gradients, strict=True):
            if gradient is not None:
                self._add_rows(call, gradient)
        self.end_backward()

    @property
    def info(self) -> BatchInfo:
        """Of the micro-batch that was last put through the model."""
        return self._info

    def _begin_forward(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if module.training and self.active:
            self._open(arguments, keywords)
            self._begin_batch(arguments, keywords)

    @torch.compiler.disable
    def _open(self, arguments: tuple, keywords: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled():
            self._forward = Forward(detached=no_graph((arguments, keywords)))
            self.inputs.begin_batch()

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
            if not output.requires_grad or not is_trained(module):
                return
            recomputed = torch._C._current_graph_task_id() != -1
            if recomputed and self.sampled:  # the first run's calls are those that are sampled
                return
            x = inputs[0] if inputs else next(iter(named.values()))
            self.inputs.see(layer.name, x)
            self.called.add(layer.name)
            sides, sums = self._due(layer, index).sides, self._use_sums(layer, index)
            if not sides:
                return
            x, info, forward = x.detach(), self._info_of(layer.uses[index].module, self._info), self._forward
            with_gradient = recomputed or kind.needs_gradients
            if not with_gradient and sums.A is not None and x.numel():
                self._add_input(layer, index, module, x, info, forward.inputs_of(layer.name, index, sums.A))
            x = x if with_gradient and "A" in sides else None
            values = layer, index, module, info, output.shape, sides, forward, x, recomputed
            if self.sampled:
                self.pending.append(AskedCall(*values, edge=edge_of(output)))
            else:
                call = Call(*values)
                on_gradient(output, lambda gradient: self._on_gradient(call, gradient))

        return hook

    def _on_gradient(self, call: Call, gradient: Tensor | None) -> None:
        if gradient is None or not self.active:
            return
        if self._own.covers(call.forward):
            self._add_rows(call, gradient)
        else:
            self.strangers += 1

    def _add_rows(self, call: Call, gradient: Tensor) -> None:
        """Of both sides, unless they are too late; a call with an empty batch has none."""
        self.counted += 1
        name, use = call.layer.name, call.use
        needs_x = LAYERS[call.layer.uses[use].kind].needs_gradients
        sum_A, waiting = self._use_sums(call.layer, use).A, call.forward.waiting.pop((name, use), None)
        if sum_A is not None and waiting is not None:
            sum_A.add_(waiting)
        if sum_A is not None and not needs_x and call.x is not None and call.x.numel():
            self._add_input(call.layer, use, call.module, call.x, call.info, sum_A)
        if gradient.numel() and not (needs_x and call.x is None):
            self._add_gradient(call, gradient)
        if call.recomputed:
            call.x = None
        elif call.x is not None:
            self._arrived.append(call)
        self.on_rows(name, use, call.sides)

    def _due(self, layer: LayerSpec, index: int) -> UseSums:
        """What is due of a use in this step."""
        if self._sums is None:
            self._sums = self._allocate()
        uses = self._sums.get(layer.name)
        return UseSums(None, None) if uses is None else uses[index]

    def _use_sums(self, layer: LayerSpec, index: int) -> UseSums:
        """The same without what has left."""
        sums = self._due(layer, index)
        for side in sums.sides:
            if self.gone(layer.name, index, side):
                sums = sums.having(side, None)
        return sums

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

    def _new_terms(self, call: Call, terms: Tensor | int) -> Tensor | int:
        """Loss terms that this micro-batch has not counted yet: a second use of a layer adds rows, not terms."""
        key = (call.layer.name, call.use)  # rows of A and of G are the same terms, and only one of both is made here
        counted = self._terms.get(key, 0)
        if isinstance(terms, Tensor):  # told by the batch, the same for every call
            self._terms[key] = 1
            return 0 if counted else terms
        self._terms[key] = max(counted, terms)
        return max(0, terms - counted)
