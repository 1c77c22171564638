"""Hooks on the layers: batch sums of a a^T and g g^T, only on the micro-steps that need them.

A is added in the forward hook, G when the gradient of the output arrives. The gradient is taken by a prehook on
the output's grad_fn, because a tensor hook would run before DeepSpeed divides an engine output's gradient by the
accumulation steps, and a full backward hook breaks with in-place activations. An in-place activation also replaces
the grad_fn of a view, which the output of a Linear with bias is; the node of the viewed tensor stays.

Activation checkpointing runs a forward twice. Reentrant: the first run has gradients disabled and is passed over.
Non-reentrant: the first run counts; the recomputation's graph never gets a gradient, so it must not count A. Hence
a forward inside a backward adds A only once its gradient arrives.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import LAYERS
from ds_kfac.ops.functional import syrk_accumulate_


@dataclass(frozen=True)
class BatchSums:
    """Where one layer's sums of this step go; views of a bucket, added to in place.

    Attributes:
        A_P, G_P: fp32, packed sums of outer products.
        counts_2: fp32 [2]: rows of A (uses of the layer times loss terms), loss terms of G.
    """

    A_P: Tensor
    G_P: Tensor
    counts_2: Tensor


class Capture:
    """Installs the hooks; they return at once unless :attr:`active`.

    Args:
        model: holds the layers.
        layers: what :func:`ds_kfac.scan.scan` found.
        allocate: called at the first rows of a step, gives a zeroed :class:`BatchSums` per layer name.
        fallback_seed: the scale of a backward that nobody announced by :meth:`begin_backward`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerSpec],
        allocate: Callable[[], Mapping[str, BatchSums]],
        fallback_seed: Callable[[], Tensor | float],
    ) -> None:
        self.active = False
        self._allocate, self._fallback_seed = allocate, fallback_seed
        self._sums: Mapping[str, BatchSums] | None = None
        self._seed: Tensor | float | None = None
        self._terms: dict[str, int] = {}  # layer -> loss terms already counted in this micro-batch
        self.called: set[str] = set()
        self._handles = [model.register_forward_pre_hook(self._begin_forward)]
        for spec in layers:
            module = model.get_submodule(spec.name)
            self._handles.append(module.register_forward_hook(self._forward_hook(spec), with_kwargs=True))

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

    def take(self) -> Mapping[str, BatchSums] | None:
        """The sums since the last call, None if no layer ran; forgets them."""
        sums, self._sums = self._sums, None
        self.end_backward()
        return sums

    def _begin_forward(self, module: nn.Module, inputs: tuple) -> None:
        if self._terms and torch._C._current_graph_task_id() == -1:  # a loss.backward() that nobody closed
            self.end_backward()

    def _forward_hook(self, spec: LayerSpec) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, named: dict[str, Any], output: Tensor) -> None:
            if not (self.active and module.training and torch.is_grad_enabled() and output.requires_grad):
                return
            recomputing = torch._C._current_graph_task_id() != -1
            rows = LAYERS[spec.kind].rows(inputs[0] if inputs else next(iter(named.values())))
            if not recomputing:
                self._add_A(spec, rows)
            kept = rows if recomputing else None  # checkpointing must be able to free the activation
            whole = _origin(output)
            node, index = whole.grad_fn, whole.output_nr
            assert node is not None  # output.requires_grad

            def on_gradient(gradients: tuple[Tensor | None, ...]) -> None:
                gradient = gradients[index]
                if gradient is None:
                    return
                if kept is not None:
                    self._add_A(spec, kept)
                self._add_G(spec, LAYERS[spec.kind].rows(gradient))

            node.register_prehook(on_gradient)

        return hook

    def _layer_sums(self, spec: LayerSpec) -> BatchSums:
        if self._sums is None:
            self._sums = self._allocate()
        return self._sums[spec.name]

    @torch.no_grad()
    def _add_A(self, spec: LayerSpec, rows_NI: Tensor) -> None:
        sums = self._layer_sums(spec)
        syrk_accumulate_(sums.A_P, rows_NI, ones_column=spec.bias is not None)
        sums.counts_2[0].add_(len(rows_NI))
        self.called.add(spec.name)

    @torch.no_grad()
    def _add_G(self, spec: LayerSpec, rows_NO: Tensor) -> None:
        """Rows of M g-hat / seed: the gradient of each loss term, M of them averaged in the loss.

        Unscaled in fp32 before the product: the square of a gradient scaled by 2^16 overflows.
        """
        sums = self._layer_sums(spec)
        seed = self._fallback_seed() if self._seed is None else self._seed
        terms = len(rows_NO)
        syrk_accumulate_(sums.G_P, rows_NO.float() * (terms / seed))
        # A second use of the layer in this micro-batch adds rows, not loss terms.
        counted = self._terms.get(spec.name, 0)
        if terms > counted:
            sums.counts_2[1].add_(terms - counted)
            self._terms[spec.name] = terms


def _origin(output: Tensor) -> Tensor:
    """The tensor that ``output`` is a reshaped view of, or ``output``."""
    base = output._base
    return base if base is not None and base.numel() == output.numel() and base.grad_fn is not None else output
