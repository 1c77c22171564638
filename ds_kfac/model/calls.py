"""Calls of layers on their way through autograd: what waits for the gradient of an output.

A hook on a node of the graph holds its call as long as the graph lives. So a call must never hold the node: that cycle
runs through C++, where no garbage collector sees it, and would never free the graph and its activations.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from ds_kfac.model.batch_info import BatchInfo
from ds_kfac.model.batch_sum import BatchSum
from ds_kfac.model.layers.base import LayerSpec, LayerType
from ds_kfac.model.loss_terms import LossTerms
from ds_kfac.model.row_masks import Fit


@dataclass(eq=False)
class Forward:
    """One run of the model.

    Its input sums wait for its backward: a batch that is skipped, and a run for another engine's loss, count nothing.
    Held by its calls, so that they go with the graph.

    Attributes:
        loss: what is known of its loss.
        detached: whether no input of the model came from another graph.
        waiting: layer -> sum of the inputs so far.
    """

    loss: LossTerms = field(default_factory=LossTerms)
    detached: bool = True
    waiting: dict[str, BatchSum] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """One call of a module whose output gradient is still to come.

    Attributes:
        kind: the layer's type.
        info: of the micro-batch, as it is for this module.
        rows: which of its rows count.
        shape: of the gradient of its rows, with examples and positions.
        sides: whose rows it has, of "AG".
        select: which rows of the output are the call's, of a product of several layers; None: all.
        columns: which of the layer's outputs they are; None: all.
        lay: makes rows of the gradient that arrives; None: it has them.
        x: its input; kept only where it is needed with the gradient, so that checkpointing can free it.
        recomputed: whether it is a recomputation, whose A is added with the gradient.
        edge: where the gradient of its output arrives, maybe flattened, if autograd is to be asked for it; no node may
            hold such a call.
    """

    layer: LayerSpec
    kind: LayerType
    module: nn.Module
    info: BatchInfo
    rows: Fit
    shape: torch.Size
    sides: str
    forward: Forward
    x: Tensor | None
    recomputed: bool
    select: slice | Tensor | None = None
    columns: slice | None = None
    lay: Callable[[Tensor], Tensor] | None = None
    edge: GradientEdge | None = None

    def gradient_of(self, gradient: Tensor) -> Tensor:
        """Its part of the gradient of an output; zero in columns that it does not have."""
        gradient = gradient if self.lay is None else self.lay(gradient)
        if self.select is not None:
            return gradient.reshape(-1, self.shape[-1])[self.select]
        if self.columns is None:
            return gradient
        part = gradient.reshape(*self.shape[:-1], self.columns.stop - self.columns.start)
        return F.pad(part, (self.columns.start, self.shape[-1] - self.columns.stop))


def edge_of(output: Tensor) -> GradientEdge:
    """Where in the graph the gradient of ``output``, or of the tensor that it is a reshaped view of, arrives.

    An in-place activation replaces the grad_fn of a view, which the output of a Linear with bias is; the node of the
    viewed tensor stays.
    """
    base = output._base
    viewed = base is not None and base.numel() == output.numel() and base.grad_fn is not None
    origin = base if viewed and base is not None else output
    assert origin.grad_fn is not None, "the output requires no gradient"
    return GradientEdge(origin.grad_fn, origin.output_nr)


def is_trained(module: Any) -> bool:
    """Whether its weight gets a gradient in the forward that runs."""
    weight = module._parameters.get("weight")  # as an attribute ZeRO-3 would fetch it
    return weight is None or weight.requires_grad


def no_graph(arguments: Iterable[Any]) -> bool:
    """Whether no tensor in ``arguments`` and containers in it was computed in a graph."""
    for value in arguments:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                return False
        elif isinstance(value, (list, tuple, Mapping)):
            if not no_graph(value.values() if isinstance(value, Mapping) else value):
                return False
    return True
