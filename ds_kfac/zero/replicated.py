"""Stage 0, and BF16_Optimizer: every rank holds every averaged gradient, at stage 0 in ``p.grad``."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.zero.layout import KnownGradient, ShardLayout
from ds_kfac.zero.shards import Shard


class Replicated(ShardLayout):
    """The bare torch (or DeepSpeed fused/CPU) optimizer; fp32 or torch_autocast."""

    replicated = True

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        if engine.pipeline_parallelism and engine.gradient_clipping():
            self.faults += ("at stage 0 it clips every pipeline stage by the norm of the first one's gradients alone",)

    def _shards(self) -> list[Shard]:
        self._group = {id(p): i for i, params in enumerate(self._param_groups()) for p in params}
        return [
            Shard(index, 0, self._numel(param), rank, self.group_index(param), 0)
            for index, param in enumerate(self.params)
            for rank in range(self.world)
        ]

    def _param_groups(self) -> list[list[Any]]:
        return [group["params"] for group in self.optimizer.param_groups]

    def group_index(self, param: nn.Parameter) -> int:
        return self._group[id(param)]

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.params[0].dtype

    @cached_property
    def grad_scaler(self) -> Any | None:
        return self.engine.torch_autocast_z0_gradscaler

    def _set_bound(self, bound: Any) -> Any:
        if bound == 0.0:
            self.engine.clip_fp32_gradients = lambda: None
        else:
            del self.engine.clip_fp32_gradients
        return self.engine.gradient_clipping()

    def squared_norm(self, shards: Sequence[Shard] | None = None) -> Tensor:
        used = [shard for shard in self.own if self.params[shard.param].grad is not None]  # of others zeros are made
        return super().squared_norm(used)

    def stored(self, shard: Shard) -> Tensor:
        param = self.params[shard.param]
        return param.new_zeros(param.numel()) if param.grad is None else param.grad.reshape(-1)

    def store(self, shard: Shard, gradient: Tensor) -> None:
        param = self.params[shard.param]
        if param.grad is None:  # unused in this step; DeepSpeed will skip it
            return
        # .data, because torch forbids a gradient of another dtype than its 16-bit parameter's
        param.grad.data = gradient.view(param.shape)

    def install(self, known: KnownGradient) -> None:
        for param in chain.from_iterable(self._param_groups_trainable()):
            param.grad = known(param).view(param.shape).to(param.dtype)

    def _param_groups_trainable(self) -> list[list[Any]]:
        return [[p for p in group if p.requires_grad] for group in self._param_groups()]

    def consume(self) -> list[Tensor]:
        params = chain.from_iterable(self._param_groups_trainable())
        return [param.grad.detach().to(torch.float32, copy=True).view(-1) for param in params]

    def clear(self) -> None:
        for param in chain.from_iterable(self._param_groups_trainable()):
            param.grad = None


class ReplicatedHalf(Replicated):
    """FP16_Optimizer and FP16_UnfusedOptimizer, which serve bf16 too; fp32 masters, 16-bit ``p.grad``."""

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        if self.optimizer.loss_scale_config.use_grad_scaling:
            self.faults += (
                "at stage 0 fp16 it divides gradients by a loss scale it never multiplied by (deepspeed PR 8393): "
                "steps of SGD are too small by it, and clipping sees a norm that is",
            )

    def _set_bound(self, bound: Any) -> Any:
        return ShardLayout._set_bound(self, bound)

    def _param_groups(self) -> list[list[nn.Parameter]]:
        return self.optimizer.fp16_groups

    def grad_scale(self) -> float:
        return float(self.optimizer.loss_scale_config.cur_scale)

    def manual_scale(self) -> float:
        return 1.0


class BF16(ShardLayout):
    """BF16_Optimizer (stage 1, bf16, fp32 accumulation): every rank holds every averaged gradient in fp32 copies.

    ``p.grad`` is only staging there; the norm is taken over all gradients, the step uses this rank's slice.
    """

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

    @cached_property
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
