"""BF16_Optimizer (stage 1, bf16, fp32 accumulation): every rank holds every averaged gradient in fp32.

``p.grad`` is only staging there; the norm is taken over all gradients, the step uses this rank's slice.
"""

import torch
from torch import Tensor, nn

from ds_kfac.zero.layout import KnownGradient, ShardLayout
from ds_kfac.zero.shards import Shard


class BF16(ShardLayout):
    """Gradients in BF16_Optimizer's fp32 copies, complete on every rank."""

    replicated = True

    def _shards(self) -> list[Shard]:
        self._place = {
            id(param): (group, position)
            for group, params in enumerate(self.optimizer.bf16_groups)
            for position, param in enumerate(params)
        }
        return [
            Shard(index, 0, param.numel(), rank, self.group_index(param), 0)
            for index, param in enumerate(self.params)
            for rank in range(self.world)
        ]

    def group_index(self, param: nn.Parameter) -> int:
        return self._place[id(param)][0]

    @property
    def dtype(self) -> torch.dtype:
        return self.optimizer.grad_acc_dtype

    def _gradient(self, param: nn.Parameter) -> Tensor:
        group, position = self._place[id(param)]
        return self.optimizer.fp32_groups_gradients[group][position].view(-1)

    def stored(self, shard: Shard) -> Tensor:
        return self._gradient(self.params[shard.param])

    def store(self, shard: Shard, gradient: Tensor) -> None:
        self._gradient(self.params[shard.param]).copy_(gradient)

    def install(self, known: KnownGradient) -> None:
        for params in self.optimizer.bf16_groups:
            for param in params:
                self._gradient(param).copy_(known(param))

    def consume(self) -> list[Tensor]:
        partitions = self.optimizer.fp32_groups_gradient_flat_partition
        return [partition.to(torch.float32, copy=True) for partition in partitions]

    def clear(self) -> None:
        self.optimizer.clear_hp_grads()
