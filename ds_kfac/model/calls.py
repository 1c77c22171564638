"""A call of a layer whose output gradient is still to come; and what it keeps of its input until
then.

A hook on a node of the graph holds its call for as long as the graph lives. So a call must never
hold that node, nor a tensor of the graph: the cycle runs through C++, where no garbage collector
sees it, and would never free the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from ds_kfac.model.layers import LayerSpec, LayerType
from ds_kfac.model.masks import Forward, Shape


class _Keep(torch.autograd.Function):
    """A node that saves a tensor and takes part in no backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


def kept(x: Tensor, *, multiplies: bool = True) -> Any:
    """A node whose ``saved_tensors`` is (x,), saved as autograd saves the input of a layer.

    Autograd keeps the storage of ``x`` for the weight's gradient anyhow, so this costs no memory;
    and whatever treats saved tensors specially (activation checkpointing, offload to the host)
    treats this one the same way.

    Args:
        multiplies: whether the layer multiplies by it. Under autocast it then multiplies a 16-bit
            copy, so a copy is saved, too: the input itself would cost memory, and the user may
            change it in place.
    """
    x, device = x.detach(), x.device.type
    if multiplies and torch.is_autocast_enabled(device) and x.dtype is torch.float32:
        x = x.to(torch.get_autocast_dtype(device))
    anchor = torch.zeros((), dtype=torch.float32, device=x.device, requires_grad=True)
    return _Keep.apply(x, anchor).grad_fn


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one call of a layer, also of one that K-FAC does not step.

    Attributes:
        layer: name of the parameter, or of the module.
        forward: the forward pass that the call belongs to.
        leading: leading dimensions of the rows, where a mask could fit them; else None.
        number: how many rows there are.
        recomputed: whether the call was made inside a backward pass. It gets a gradient then only
            if that is reentrant checkpointing's.
    """

    layer: str
    forward: Forward
    leading: Shape | None
    number: int
    recomputed: bool


@dataclass(eq=False)
class Call:
    """One call of a K-FAC layer, or one product of its matrix. An expert's is a part of a stack's
    call.

    Attributes:
        rows: those of the whole call.
        shape: shape of its rows of G, with all leading dimensions.
        sides: which factors its rows are for, "AG", "A" or "G".
        input: which input it had, see :meth:`ds_kfac.model.shared.SharedInputs.number`.
        kept: see :func:`kept`; None: its input is not needed, or was let go.
        select: which rows of the product are its own, such as those of an expert; None: all.
        columns: which outputs of the layer it made; None: all.
        to_rows: turns the gradient that arrives at the output into rows [.., O]; None: it is in
            rows.
        edge: where the gradient of its output arrives, if autograd is to be asked for it. No node
            may hold such a call.
    """

    layer: LayerSpec
    kind: LayerType
    module: nn.Module
    rows: Rows
    shape: torch.Size
    sides: str = "AG"
    input: int = -1
    kept: Any = None
    select: slice | Tensor | None = None
    columns: slice | None = None
    to_rows: Callable[[Tensor], Tensor] | None = None
    edge: GradientEdge | None = None

    @property
    def mask(self) -> Tensor | None:
        """Which of its rows the attention masks do not leave out; None: no mask fits."""
        return None if self.select is not None else self.rows.forward.mask(self.rows.leading)

    @property
    def share(self) -> float:
        """Part of the layer's outputs that it made. Its inputs count so much in A: cross attention
        has other rows for keys and values than for queries."""
        return (
            1.0
            if self.columns is None
            else (self.columns.stop - self.columns.start) / self.shape[-1]
        )

    def input_rows(self, x: Tensor) -> Tensor:
        """Its part of a product's input [.., I]."""
        return x if self.select is None else x.reshape(-1, x.shape[-1])[self.select]

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Its part of the gradient of an output, of :attr:`shape`; zero in columns that it did not
        make."""
        gradient = gradient.detach()
        if self.to_rows is not None:
            gradient = self.to_rows(gradient)
        if self.select is not None:
            gradient = gradient.reshape(-1, self.shape[-1])[self.select]
        elif self.columns is not None:
            part = gradient.reshape(*self.shape[:-1], self.columns.stop - self.columns.start)
            gradient = F.pad(part, (self.columns.start, self.shape[-1] - self.columns.stop))
        return gradient.reshape(self.shape)
