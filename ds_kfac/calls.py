"""Calls of layers on their way through autograd, and the sums that their rows are added to."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ds_kfac.batch_info import BatchInfo
from ds_kfac.layers.base import LayerSpec
from ds_kfac.loss_terms import LossTerms
from ds_kfac.row_masks import Fit


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


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module whose output gradient is still to come.

    Attributes:
        loss: of the forward in which it was made.
        info: of the micro-batch, as it is for this module.
        rows: which of its rows count.
        edge: where in the graph its output's gradient arrives, maybe flattened.
        shape: of the output, with its examples and positions.
        x: its input; kept only where it is needed with the gradient, so that checkpointing can free it.
        input_too: whether A is added with the gradient, because the call was a recomputation.
    """

    layer: LayerSpec
    use: int
    module: nn.Module
    loss: LossTerms
    info: BatchInfo
    rows: Fit
    edge: GradientEdge
    shape: torch.Size
    x: Tensor | None
    input_too: bool
