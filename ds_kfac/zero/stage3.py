"""ZeRO-3: every parameter is cut in ``world`` equal chunks, the last ones padded; a rank holds its chunk's gradient."""

from functools import cached_property

import torch
from torch import Tensor, nn

from ds_kfac.zero.layout import KnownGradient, ZeroLayout
from ds_kfac.zero.shards import Shard, partition_chunks


class Stage3(ZeroLayout):
    """Gradients in DeepSpeedZeroOptimizer_Stage3's partitions: a chunk of every parameter on every rank."""

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self._chunks: list[Tensor] = []
        if not self.optimizer.offload_optimizer:
            self.faults += (
                "a parameter outside of K-FAC layers that a step does not use is stepped with its last gradient again",
            )

    def _averages_sequence(self) -> bool:
        return bool(self.engine.zero_reduce_scatter())

    def _shards(self) -> list[Shard]:
        self._place = {
            id(param): (group, position)
            for group, params in enumerate(self.optimizer.fp16_groups)
            for position, param in enumerate(params)
        }
        shards = []
        for index, param in enumerate(self.params):
            group, _ = self._place[id(param)]
            offset = self.optimizer.grad_position[self.optimizer.get_param_id(param)][1]
            shards += partition_chunks(param.ds_numel, index, group, offset, self.world)
        return shards

    def group_index(self, param: nn.Parameter) -> int:
        return self.optimizer.sub_group_to_group_id[self._place[id(param)][0]]

    @cached_property
    def dtype(self) -> torch.dtype:
        if self.optimizer.offload_optimizer:
            return self.optimizer.master_weights_and_grads_dtype
        return self.optimizer.gradient_accumulation_dtype

    @cached_property
    def in_place(self) -> bool:
        return not self.optimizer.offload_optimizer and self.dtype is not torch.float16

    def begin(self) -> None:
        if self.optimizer.offload_optimizer:
            self._zero_unused(self.optimizer.norm_for_param_grads, self._chunk)
        else:
            self._chunks = [self._chunk(shard) for shard in self.own]

    def end(self) -> None:
        """DeepSpeed keeps a parameter's last gradient: were it not used in the next step, that would be stepped with
        again."""
        while self._chunks:
            self._chunks.pop().zero_()

    def _chunk(self, shard: Shard) -> Tensor:
        """The whole chunk, padding included, where DeepSpeed keeps it."""
        param = self.params[shard.param]
        if self.optimizer.offload_optimizer:
            flat = self.optimizer.fp32_partitioned_groups_flat[shard.group].grad
            return flat.narrow(0, shard.offset, param.partition_numel())
        return self.optimizer.averaged_gradients[shard.group][self._place[id(param)][1]].view(-1)

    def stored(self, shard: Shard) -> Tensor:
        return self._chunk(shard).narrow(0, 0, shard.numel)

    def store(self, shard: Shard, gradient: Tensor) -> None:
        param = self.params[shard.param]
        chunk = self._chunk(shard)
        if self.optimizer.offload_optimizer:
            chunk.narrow(0, 0, shard.numel).copy_(gradient)
            # DeepSpeed clips by norms it cached during backward
            self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = gradient.double().norm()
            return
        if self.in_place:
            chunk.narrow(0, 0, shard.numel).copy_(gradient)
            return
        if chunk.numel() > shard.numel:
            padded = torch.zeros(chunk.numel(), dtype=torch.float32, device=chunk.device)
            padded.narrow(0, 0, shard.numel).copy_(gradient)
            gradient = padded
        self.optimizer.averaged_gradients[shard.group][self._place[id(param)][1]] = gradient

    # self-test

    def install(self, known: KnownGradient) -> None:
        optimizer = self.optimizer
        for group, params in enumerate(optimizer.fp16_groups):
            chunks = []
            for param in params:
                size = param.partition_numel()
                start = self.rank * size
                full = known(param)
                real = max(0, min(size, full.numel() - start))
                chunk = torch.zeros(size, dtype=self.dtype, device=full.device)
                if real:
                    chunk.narrow(0, 0, real).copy_(full.narrow(0, start, real))
                chunks.append(chunk)
            if optimizer.offload_optimizer:
                optimizer.fp32_partitioned_groups_flat[group].grad.copy_(optimizer.flatten(chunks))
            else:
                optimizer.averaged_gradients[group] = chunks

    def consume(self) -> list[Tensor]:
        optimizer, flats = self.optimizer, []
        for group in range(len(optimizer.fp16_groups)):
            if optimizer.offload_optimizer:
                flat = optimizer.fp32_partitioned_groups_flat[group].grad
            else:
                flat = optimizer.flatten(optimizer.averaged_gradients[group])
            flats.append(flat.to(torch.float32, copy=True))
        return flats

    def clear(self) -> None:
        optimizer = self.optimizer
        if optimizer.offload_optimizer:
            for flat in optimizer.fp32_partitioned_groups_flat:
                flat.grad.zero_()
            optimizer.norm_for_param_grads = {}
        else:
            optimizer.averaged_gradients = {}
