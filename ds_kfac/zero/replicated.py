"""Stage 0, and BF16_Optimizer: every rank holds every averaged gradient, at stage 0 in ``p.grad``."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ds_kfac.zero.layout import KnownGradient, ShardLayout
from ds_kfac.zero.shards import Shard


class Replicated(ShardLayout):
    """The bare torch (or DeepSpeed fused/CPU) optimizer; fp32 or torch_autocast."""

    replicated = True
    clipping = ("", "clip_fp32_gradients", lambda: None)

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self.grad_scaler = engine.torch_autocast_z0_gradscaler
        self._trained = [param for group in self._groups for param in group if param.requires_grad]
        if engine.pipeline_parallelism and engine.gradient_clipping():
            self.faults += ("at stage 0 it clips every pipeline stage by the norm of the first one's gradients alone",)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.params[0].dtype

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
        for param in self._trained:
            param.grad = known(param).view(param.shape).to(param.dtype)

    def consume(self) -> list[Tensor]:
        return [param.grad.detach().to(torch.float32, copy=True).view(-1) for param in self._trained]

    def clear(self) -> None:
        for param in self._trained:
            param.grad = None


class ReplicatedHalf(Replicated):
    """FP16_Optimizer and FP16_UnfusedOptimizer, which serve bf16 too; fp32 masters, 16-bit ``p.grad``."""

    clipping = ShardLayout.clipping

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        if self.optimizer.loss_scale_config.use_grad_scaling:
            self.faults += (
                "at stage 0 fp16 it divides gradients by a loss scale it never multiplied by (deepspeed PR 8393): "
                "steps of SGD are too small by it, and clipping sees a norm that is",
            )

    def grad_scale(self) -> float:
        return float(self.optimizer.loss_scale_config.cur_scale)

    def manual_scale(self) -> float:
        return 1.0


class BF16(ShardLayout):
    """BF16_Optimizer (stage 1, bf16, fp32 accumulation): every rank holds every averaged gradient in fp32 copies.

    ``p.grad`` is only staging there; the norm is taken over all gradients, the step uses this rank's slice.
    """

    replicated = True

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
        for param in (param for params in self._groups for param in params):
            self._gradient(param).copy_(known(param))

    def consume(self) -> list[Tensor]:
        partitions = self.optimizer.fp32_groups_gradient_flat_partition
        return [partition.to(torch.float32, copy=True) for partition in partitions]

    def clear(self) -> None:
        self.optimizer.clear_hp_grads()
