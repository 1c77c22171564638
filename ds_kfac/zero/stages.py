"""ZeRO-1/2: every parameter group is one flat buffer, cut in equal slices; a rank holds the gradient of its slice.

Without offload the slice is a list of tensors that DeepSpeed concatenates at its step; in fp16 an entry is replaced by
an fp32 one, which stays so in that (type-promoting) concatenation. With offload it is the ``.grad`` of fp32 masters.

ZeRO-3: every parameter is cut in ``world`` equal chunks, the last ones padded; a rank holds its chunk's gradient.
"""

from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.zero.layout import KnownGradient, ZeroLayout
from ds_kfac.zero.shards import Shard, partition_chunks, partition_flat


class Stage12(ZeroLayout):
    """Gradients in DeepSpeedZeroOptimizer's flat buffers: a slice of every parameter group on every rank."""

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        optimizer = self.optimizer
        if optimizer.round_robin_gradients and not optimizer.parameter_alignment:
            self.faults += (
                "with round_robin_gradients safe_get_full_* and universal checkpoints read other parameters",
            )
        if optimizer.dtype == torch.bfloat16 and not optimizer.check_grad_overflow:
            self.faults += ("in bf16 it applies gradients that are not finite, unless bf16.check_grad_overflow is set",)

    def _shards(self) -> list[Shard]:
        optimizer = self.optimizer
        self._entry_of: dict[Shard, int] = {}
        self._group = {id(p): i for i, params in enumerate(optimizer.bit16_groups) for p in params}
        shards = []
        # round_robin_bit16_* hold the order in the flat buffer, whether or not round_robin_gradients is on
        for group, params in enumerate(optimizer.round_robin_bit16_groups):
            places = [(p, o) for p, o in zip(params, optimizer.round_robin_bit16_offsets[group], strict=True)]
            own = [(p.numel(), o, self._index[id(p)]) for p, o in places if id(p) in self._index]
            if own:
                numels, offsets, indices = zip(*own, strict=True)
                size = int(optimizer.partition_size[group])
                shards += partition_flat(numels, offsets, indices, group, size, self.world)
        return shards

    def group_index(self, param: nn.Parameter) -> int:
        return self._group[id(param)]

    @cached_property
    def dtype(self) -> torch.dtype:
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            return optimizer.master_weights_and_grads_dtype
        return optimizer.gradient_accumulation_dtype

    @cached_property
    def in_place(self) -> bool:
        return not self.optimizer.cpu_offload and self.dtype is not torch.float16

    def begin(self) -> None:
        optimizer = self.optimizer
        optimizer._wait_for_offload_copies()
        if optimizer.cpu_offload:
            self._zero_unused(optimizer.norm_for_param_grads, self._offloaded)

    def _entry(self, shard: Shard) -> int:
        """Which entry of the list starts at the shard's offset in this rank's slice. It has the same form always."""
        entries, known = self.optimizer.averaged_gradients[shard.group], self._entry_of.get(shard)
        if known is not None and entries[known].numel() == shard.numel:
            return known
        starts = accumulate((entry.numel() for entry in entries), initial=0)
        for index, start in zip(range(len(entries)), starts, strict=False):
            if start == shard.offset and entries[index].numel() == shard.numel:
                self._entry_of[shard] = index
                return index
        raise RuntimeError(
            f"ds_kfac: ZeRO-{1 + self.optimizer.partition_gradients} group {shard.group} has no gradient of "
            f"{shard.numel} elements at offset {shard.offset}; this DeepSpeed lays gradients out differently, "
            "use a version named in the README"
        )

    def stored(self, shard: Shard) -> Tensor:
        if self.optimizer.cpu_offload:
            return self._offloaded(shard)
        return self.optimizer.averaged_gradients[shard.group][self._entry(shard)].reshape(-1)

    def store(self, shard: Shard, gradient: Tensor) -> None:
        if self.optimizer.cpu_offload:
            self._offloaded(shard).copy_(gradient)
            # DeepSpeed clips by norms it cached during backward
            param_id = self.optimizer.get_param_id(self.params[shard.param])
            self.optimizer.norm_for_param_grads[param_id] = gradient.double().norm()
            return
        entries, index = self.optimizer.averaged_gradients[shard.group], self._entry(shard)
        flat = getattr(entries, "flat_partition", None)  # where it is, this, not the list, is what the step takes
        if self.in_place or flat is not None:
            entries[index].view(-1).copy_(gradient)
        else:
            entries[index] = gradient.view(entries[index].shape)

    def _offloaded(self, shard: Shard) -> Tensor:
        return self.optimizer.single_partition_of_fp32_groups[shard.group].grad.narrow(0, shard.offset, shard.numel)

    # self-test: filled and consumed by DeepSpeed's own functions

    def install(self, known: KnownGradient) -> None:
        optimizer = self.optimizer
        for group, params in enumerate(optimizer.params_in_partition):
            if optimizer.cpu_offload:
                for param in params:
                    gradient = known(param).view(param.shape).to(param.device, param.dtype)
                    self._stage_gradient(param, gradient)
                    optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)
                optimizer._wait_for_offload_copies()
            elif optimizer._use_compact_grad_partition_buffer(group):
                self._install_compact(group, known)
            else:
                dtype = optimizer.gradient_accumulation_dtype
                optimizer.all_grad_tensors[group] = [known(p).view(p.shape).to(p.device, dtype) for p in params]
                optimizer.averaged_gradients[group] = optimizer.get_flat_partition(
                    params,
                    optimizer.first_offset[group],
                    optimizer.partition_size[group],
                    dtype=dtype,
                    device=self.engine.device,
                    param_group_idx=group,
                    return_tensor_list=True,
                )

    def _stage_gradient(self, param: Any, gradient: Tensor) -> None:
        if self.optimizer.use_grad_accum_attribute:
            param.grad_accum = gradient
        else:
            param.grad = gradient

    def _install_compact(self, group: int, known: KnownGradient) -> None:
        optimizer = self.optimizer
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[group])
        optimizer.averaged_gradients[group] = optimizer._build_compact_grad_partition_buffer(group)
        for param in optimizer.params_in_partition[group]:
            param_id = optimizer.get_param_id(param)
            start = int(optimizer.grad_start_offset[group][rank][param_id])
            offset = int(optimizer.grad_partition_insertion_offset[group][rank][param_id])
            flat = optimizer.averaged_gradients[group].flat_partition
            numel = min(param.numel() - start, flat.numel() - offset)
            flat.narrow(0, offset, numel).copy_(known(param).narrow(0, start, numel))

    def consume(self) -> list[Tensor]:
        optimizer, flats = self.optimizer, []
        for group in range(len(optimizer.bit16_groups)):
            if optimizer.cpu_offload:
                flats.append(optimizer.single_partition_of_fp32_groups[group].grad.to(torch.float32, copy=True))
                continue
            flat = optimizer._get_preflattened_grad_partition(group)
            if flat is None:
                flat = optimizer.flatten(optimizer.averaged_gradients[group])
            flats.append(flat.to(torch.float32, copy=True))
        return flats

    def clear(self) -> None:
        optimizer = self.optimizer
        for group in range(len(optimizer.bit16_groups)):
            if optimizer.cpu_offload:
                optimizer.single_partition_of_fp32_groups[group].grad.zero_()
                optimizer.norm_for_param_grads = {}
            else:
                optimizer.averaged_gradients[group] = None
                optimizer.all_grad_tensors[group] = None


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
