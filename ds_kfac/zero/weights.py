"""Rescales weights after a step (Osawa et al. 2019, arXiv:1811.12019; SP-NGD), for layers before a norm, where the size
of a weight only acts as a learning rate:

    w <- w min(1, sqrt(2 O) / (|w| + 1e-9))        O the first dimension of w: outputs

DeepSpeed's fp32 masters and the weights that the model computes with are multiplied by the same factor. Every rank
computes it from the norm of the whole weight, which at stage 3 is summed over the chunks of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.registry import MATRICES
from ds_kfac.zero.layout import ReplicatedHalf, ShardLayout
from ds_kfac.zero.shards import parameter_names
from ds_kfac.zero.stages import Stage3, Stage12

SMALLEST = 1e-9


class WeightRescaling:
    """Rescales linear and convolutional layers. ``layers``: in the order of the layout's parameters."""

    def __init__(self, layout: ShardLayout, layers: Sequence[LayerSpec]) -> None:
        place = {name: index for index, name in enumerate(parameter_names(layers))}
        self.layout: Any = layout
        self.weights = [place[layer.weight] for layer in layers if layer.kind in MATRICES and layer.part[1] == 1]
        limits = [(2 * parameter_shape(layout.params[index])[0]) ** 0.5 for index in self.weights]
        self._limits = torch.tensor(limits, dtype=torch.float32, device=layout.engine.device)

    @torch.no_grad()
    def __call__(self) -> None:
        """Rescale, after an applied step. Collective at stage 3."""
        factors = (self._limits / (self._norms() + SMALLEST)).clamp(max=1.0)
        for index, factor in zip(self.weights, factors.unbind(), strict=True):
            for part in {id(part): part for part in self._parts(index)}.values():
                part.mul_(factor.to(part.device))

    def _norms(self) -> Tensor:
        """Norms of the whole weights, fp32."""
        if not isinstance(self.layout, Stage3):
            weights = (self.layout.params[index].detach().float() for index in self.weights)
            return torch.stack([torch.linalg.vector_norm(weight) for weight in weights])
        squares = torch.zeros_like(self._limits)
        for place, index in enumerate(self.weights):
            for master in self._masters(index):
                squares[place] += master.float().square().sum().to(squares.device)
        dist.all_reduce(squares, group=self.layout.group)
        return squares.sqrt()

    def _masters(self, index: int) -> list[Tensor]:
        """Views of this rank's ZeRO masters of a weight."""
        here = (shard for shard in self.layout.whole.of_param[index] if shard.rank == self.layout.rank)
        return [self.layout.masters[s.group].data.narrow(0, s.offset, s.numel) for s in here]

    def _parts(self, index: int) -> list[Tensor]:
        """All tensors on this rank that hold the weight or a part of it."""
        layout, param = self.layout, self.layout.params[index]
        if isinstance(layout, Stage3):
            whole = [param.data] if param.data.numel() == param.ds_numel else []
            return [param.ds_tensor.data, *whole, *self._masters(index)]
        if isinstance(layout, Stage12):
            return [param.data, *self._masters(index)]
        if isinstance(layout, ReplicatedHalf):
            (group, position), flat = layout.position[id(param)], getattr(layout.optimizer, "fp32_groups_flat", None)
            if flat is None:  # FP16_UnfusedOptimizer
                return [param.data, layout.optimizer.fp32_groups[group][position].data]
            start = sum(other.numel() for other in layout.groups[group][:position])
            return [param.data, flat[group].data.narrow(0, start, param.numel())]
        return [param.data]
