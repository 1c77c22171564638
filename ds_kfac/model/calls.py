"""A call of a layer. It keeps the layer's input until the gradient of the output arrives.

Note: Who holds whom. A hook on a node of autograd's graph holds its call for as long as the graph
    lives. So a call must never hold that node, nor a tensor of the graph. Otherwise there would be
    a reference cycle through C++, which Python's garbage collector does not see, and the graph
    would never be freed.
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
    """A node that saves a tensor, and does not take part in any backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


def node_that_saves(x: Tensor, *, multiplies: bool = True) -> Any:
    """Return an autograd node whose ``saved_tensors`` is (x,).

    Autograd keeps the storage of x anyway, for the weight's gradient, so this costs no memory. Code
    that treats saved tensors specially, such as activation checkpointing or offload to the host,
    treats this tensor in the same way.

    Args:
        x: the input of a layer.
        multiplies: whether the layer multiplies by x. Under autocast it then multiplies by a 16-bit
            copy of x, so a 16-bit copy is saved here. Saving x itself would take more memory, and
            the user may change x in place.
    """
    x = x.detach()
    device = x.device.type
    if multiplies and torch.is_autocast_enabled(device) and x.dtype is torch.float32:
        x = x.to(torch.get_autocast_dtype(device))
    anchor = torch.zeros((), dtype=torch.float32, device=x.device, requires_grad=True)
    return _Keep.apply(x, anchor).grad_fn


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one call of any layer, preconditioned or not.

    Attributes:
        layer: name of the parameter, or of the module.
        forward: the forward pass that the call belongs to.
        leading: sizes of the rows' dimensions before the last, such as (N, T); None if no mask can
            fit them.
        number: number of rows.
        recomputed: whether the call was made inside of a backward pass. Such a call gets a gradient
            only with reentrant checkpointing.
    """

    layer: str
    forward: Forward
    leading: Shape | None
    number: int
    recomputed: bool


@dataclass(eq=False)
class Call:
    """One call of a K-FAC layer, or one product with the layer's matrix. For an expert, it is the
    expert's part of a call of the stack.

    Attributes:
        layer: the layer.
        kind: the layer's type.
        module: the module that was called, or whose code computed the product.
        rows: the rows of the whole call. For an expert, these are all rows of the stack's call, not
            only the expert's own.
        shape: shape [.., O] of the layer's rows of G, with all leading dimensions.
        sides: the factors to which the rows are added: "AG" (both), "A" or "G".
        input: number that identifies the input, see
            :meth:`ds_kfac.model.shared.SharedInputs.number`.
        kept: the autograd node that saves the input, see :func:`node_that_saves`; None if the input
            is not needed, or is no longer needed.
        select: which rows of the product belong to the layer, such as the rows of an expert; None:
            all rows.
        columns: which outputs of the layer the call computed; None: all.
        to_rows: turns the gradient that arrives at the output into rows [.., O]; None: the gradient
            has this form already.
        edge: autograd edge at which the gradient of the output arrives; only set if this gradient
            will be requested from autograd. No hook on a node may hold a call with an edge, see
            "Note: Who holds whom".
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
        """Bool tensor of the rows' leading shape, False for rows that the attention masks leave
        out; None if no mask fits."""
        return None if self.select is not None else self.rows.forward.mask(self.rows.leading)

    @property
    def share(self) -> float:
        """The fraction of the layer's outputs that the call computed.

        In A, the outer products of the call's inputs are multiplied by this fraction. It is below
        1, for example, in cross attention with a single weight for queries, keys and values. One
        call then computes the queries, and another call computes keys and values from other rows.
        """
        if self.columns is None:
            return 1.0
        return (self.columns.stop - self.columns.start) / self.shape[-1]

    def input_rows(self, x: Tensor) -> Tensor:
        """Return the call's part of a product's input [.., I]."""
        return x if self.select is None else x.reshape(-1, x.shape[-1])[self.select]

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Return the call's part of an output's gradient, as a tensor of the shape :attr:`shape`.

        It is zero in columns that the call did not compute.
        """
        gradient = gradient.detach()
        if self.to_rows is not None:
            gradient = self.to_rows(gradient)
        if self.select is not None:
            gradient = gradient.reshape(-1, self.shape[-1])[self.select]
        elif self.columns is not None:
            part = gradient.reshape(*self.shape[:-1], self.columns.stop - self.columns.start)
            gradient = F.pad(part, (self.columns.start, self.shape[-1] - self.columns.stop))
        return gradient.reshape(self.shape)
