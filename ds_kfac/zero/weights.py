"""Rescale weights after a step (Osawa et al. 2019, arXiv:1811.12019; SP-NGD). This is meant for
layers that are followed by a normalization layer, because the size of their weights only changes
the effective learning rate. The rule is

    w <- w min(1, sqrt(2 O) / (|w| + 1e-9))        O: number of outputs, the first dimension of w

DeepSpeed's fp32 masters and the weights that the model computes with are multiplied by the same
factor. Every rank computes the factor from the norm of the whole weight. At stage 3 the norm is
computed from the chunks of all ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.registry import MATRICES
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.shards import of_layers
from ds_kfac.zero.stages import Stage3

SMALLEST = 1e-9


class WeightRescaling:
    """Rescales the weights of linear and convolutional layers.

    Args:
        layers: the layers to which the layout's parts belong, in the order of the parts.

    Attributes:
        weights: indices of the layout's parts that are rescaled. If there are none, the object must
            not be called.
    """

    def __init__(self, layout: ShardLayout, layers: Sequence[LayerSpec]) -> None:
        self.layout: Any = layout
        parts = of_layers(layers)
        uncut = [layer for layer in layers if layer.kind in MATRICES and layer.part[1] == 1]
        self.weights = [parts[layer.name][0] for layer in uncut]
        limits = [(2 * parameter_shape(layout.param_of(part))[0]) ** 0.5 for part in self.weights]
        self._limits = torch.tensor(limits, dtype=torch.float32, device=layout.engine.device)

    @torch.no_grad()
    def __call__(self) -> None:
        """Rescale the weights after an applied step. Collective at stage 3."""
        factors = (self._limits / (self._norms() + SMALLEST)).clamp(max=1.0)
        for part, factor in zip(self.weights, factors.unbind(), strict=True):
            if not self.layout.param_of(part).requires_grad:
                continue  # frozen after attach, so no step changes it
            for view in (*self._computed_with(part), *self._masters(part)):
                view.mul_(factor.to(view.device))

    def _norms(self) -> Tensor:
        """Return the norm of each whole weight, fp32 [number of weights]. At stage 3, squares are
        summed over the chunks of all ranks."""
        if not isinstance(self.layout, Stage3):
            weights = (self.layout.param_of(part).detach().float() for part in self.weights)
            return torch.stack([torch.linalg.vector_norm(weight) for weight in weights])
        squares = torch.zeros_like(self._limits)
        for place, part in enumerate(self.weights):
            for master in self._masters(part):
                squares[place] += master.float().square().sum().to(squares.device)
        dist.all_reduce(squares, group=self.layout.group)
        return squares.sqrt()

    def _masters(self, part: int) -> Iterator[Tensor]:
        """Yield views of a weight in this rank's masters. Yield nothing if the parameter itself is
        the master."""
        layout = self.layout
        for shard in layout.shards.of_param[part]:
            if shard.rank != layout.rank or layout.master(shard) is layout.param_of(part):
                continue
            master = layout.master(shard).data
            # a master that holds only this weight may not be contiguous, for example in
            # channels_last
            if shard.numel == master.numel():
                yield master
            else:
                yield master.view(-1).narrow(0, shard.offset, shard.numel)

    def _computed_with(self, part: int) -> list[Tensor]:
        """Return this rank's tensors that hold a weight and that the model computes with. At stage
        3 these are this rank's chunk, and the gathered weight if it exists."""
        param = self.layout.param_of(part)
        if not isinstance(self.layout, Stage3):
            return [param.data]
        gathered = [param.data] if param.data.numel() == param.ds_numel else []
        return [param.ds_tensor.data, *gathered]
