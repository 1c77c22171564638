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
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ds_kfac.batch_info import BatchInfo, ReadBatch
from ds_kfac.calls import BatchSum, Call, UseSums
from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import LAYERS
from ds_kfac.loss_terms import LossTerms
from ds_kfac.row_masks import RowMasks
from ds_kfac.row_sums import RowSums
from ds_kfac.rows import RowRule
from ds_kfac.shared_inputs import SharedInputs

__all__ = ["BatchSum", "Call", "Capture", "UseSums"]


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
        loss: what is known of the loss of the model's last forward.
        pending: calls without gradients yet, of all forwards; filled only if ``sampled``.
        on_rows: called with (layer, use, side) after rows were added; set your own.
        rows: adds them up.
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
        self.sampled, self.rows = sampled, RowSums(rule or RowRule(), stage, divided=not sampled)
        self.read_batch: ReadBatch = read_batch or (lambda arguments, keywords: BatchInfo())
        self.pending: list[Call] = []
        self.inputs = inputs or SharedInputs()
        self.on_rows: Callable[[str, int, str], None] = lambda layer, use, side: None
        self._allocate, self._fallback_seed = allocate, fallback_seed
        self._sums: Mapping[str, Sequence[UseSums]] | None = None
        self._seed: Tensor | float | None = None
        self.loss, self._info_of = LossTerms(), info_of or (lambda module, info: info)
        self._masks = RowMasks(model)
        self.called: set[str] = set()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            model.register_forward_hook(self._end_forward),
        ]
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
        self._masks.remove()
        self.active = False

    def begin_backward(self, seed: Tensor) -> None:
        """The gradient that reached the user's loss: by what every output gradient is scaled from here on."""
        self._seed = seed.detach().float()

    def end_backward(self) -> None:
        """Close the micro-batch: the next rows are new loss terms, not another use of the same ones."""
        self._seed = None
        self.rows.close()
        self.inputs.end_batch()

    def take(self) -> Mapping[str, Sequence[UseSums]] | None:
        """The sums since the last call, None if no layer ran; forgets them."""
        sums, self._sums = self._sums, None
        self.loss, self.pending = LossTerms(), []
        self.end_backward()
        return sums

    def add_sampled(self, calls: Sequence[Call], gradients: Sequence[Tensor | None], seed: Tensor | float) -> None:
        """Gradients of the sampled loss, times ``seed``, for some of :attr:`pending`; None where unused."""
        self._seed = seed
        for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):  # as a backward would come by
            if gradient is not None:
                self._add_gradient(call, gradient)
        done = {id(call) for call in calls}
        self.pending = [call for call in self.pending if id(call) not in done]
        self.end_backward()

    def _begin_forward(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if module.training and self.active and torch.is_grad_enabled():
            self._begin_batch(arguments, keywords)

    def _end_forward(self, module: nn.Module, arguments: tuple, output: Any) -> None:
        if module.training and self.active and torch.is_grad_enabled():
            self._end_batch(output)

    @torch.compiler.disable
    def _begin_batch(self, arguments: tuple, keywords: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self.rows.open:  # a loss.backward() that nobody closed
            self.end_backward()
        self.loss = LossTerms(self.read_batch(arguments, keywords))
        self._masks.begin()

    @torch.compiler.disable
    def _end_batch(self, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.loss.returned(output, weight_sharing=self.rows.rule.weight_sharing)
            self._masks.end()

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
            name = layer.uses[index].module
            info = self._info_of(name, self.loss.info)
            rows = self._masks.of(name, x, tuple(x.shape[:-1] if x.is_floating_point() else x.shape), info)
            if not with_gradient and sums.A is not None:
                self.rows.add_input(layer, index, module, x, rows, sums.A)
                self.on_rows(layer.name, index, "A")
            if sums.G is None and not (with_gradient and sums.A is not None):  # its gradients are not asked for
                return
            origin = _origin(output)
            assert origin.grad_fn is not None  # output.requires_grad
            edge = GradientEdge(origin.grad_fn, origin.output_nr)
            input_too = recomputing and not kind.needs_gradients
            x = x if with_gradient else None
            call = Call(layer, index, module, self.loss, info, rows, edge, output.shape, x, input_too)
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
            self.rows.add_input(call.layer, call.use, call.module, call.x, call.rows, sum_A)
            self.on_rows(call.layer.name, call.use, "A")
        self._add_gradient(call, gradient)

    def _add_gradient(self, call: Call, gradient: Tensor) -> None:
        seed = self._fallback_seed() if self._seed is None else self._seed
        for side in self.rows.add_gradient(call, gradient, self._use_sums(call.layer, call.use), seed):
            self.on_rows(call.layer.name, call.use, side)

    def _use_sums(self, layer: LayerSpec, index: int) -> UseSums:
        if self._sums is None:
            self._sums = self._allocate()
        uses = self._sums.get(layer.name)
        return UseSums(None, None) if uses is None else uses[index]


def _origin(output: Tensor) -> Tensor:
    """The tensor that ``output`` is a reshaped view of, or ``output``."""
    base = output._base
    return base if base is not None and base.numel() == output.numel() and base.grad_fn is not None else output
