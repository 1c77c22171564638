"""ZeRO-1/2: every parameter group is one flat buffer, cut in equal slices; a rank holds the gradient of its slice.

Without offload the slice is a list of tensors that DeepSpeed concatenates at its step. In fp16 we replace an entry by
an fp32 one: the concatenation promotes types and keeps it so. With offload the slice is the ``.grad`` of fp32 masters.

ZeRO-3: every parameter is cut in ``world`` equal chunks, the last ones padded; a rank holds its chunk's gradient.
"""

from abc import abstractmethod
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.layout import KnownGradient, ShardLayout, scaler_scale
from ds_kfac.zero.shards import Shard, partition_chunks, partition_flat

NO_GRADIENTS = "ds_kfac: engine.step() has no gradients: call engine.backward(loss) between two steps"


class ZeroLayout(ShardLayout):
    """Common to ZeRO-1/2 and 3.

    Attributes:
        offloads: see :meth:`offloaded`.
    """

    OFFLOADS, MASTERS = "", ""
    """Names of DeepSpeed's attributes: whether it offloads; its flat fp32 masters by group."""

    def __init__(self, engine: Any, *values: Any, **named: Any) -> None:
        super().__init__(engine, *values, **named)
        self.offloads = self.offloaded(self.optimizer)
        self.grad_scaler = deepspeed_versions.grad_scaler(engine)
        self.clips_scaled = bool(self.grad_scaler)
        inner, scheduler = engine.basic_optimizer, engine.lr_scheduler
        if isinstance(inner, torch.optim.Adagrad) and getattr(scheduler, "optimizer", None) is inner:
            self.faults += (
                "it steps with an Adagrad of its own, whose rate your scheduler does not change: name a scheduler in "
                "the config, or use ZeRO stage 0 or another optimizer",
            )
        if self.clips_scaled and self.optimizer.clip_grad > 0:
            self.faults += ("with torch_autocast fp16 it clips the gradient while it carries the GradScaler's scale",)

    @classmethod
    def offloaded(cls, optimizer: Any) -> bool:
        """Whether DeepSpeed keeps gradients and masters on the host."""
        return bool(getattr(optimizer, cls.OFFLOADS))

    @property
    def masters(self) -> list[Any]:
        return getattr(self.optimizer, self.MASTERS)

    @cached_property
    def dtype(self) -> torch.dtype:
        dtype = deepspeed_versions.master_dtype if self.offloads else deepspeed_versions.gradient_dtype
        return dtype(self.optimizer)

    @cached_property
    def in_place(self) -> bool:
        return not self.offloads and self.dtype is not torch.float16

    def grad_scale(self) -> Tensor | float:
        # as a float: it may be an int of 2**32 or more, whose square no integer tensor holds
        return scaler_scale(self.grad_scaler) if self.grad_scaler else float(self.optimizer.loss_scale)

    def begin(self) -> None:
        """With offload DeepSpeed does not clear the buffer of a parameter that this step did not use: our last result
        in it would be preconditioned again. DeepSpeed's cached norms show which parameters had a gradient. Without
        offload nothing is there after a step, until the next backward: ranks without layers would wait for others."""
        if not self.offloads:
            if all(own is None for own in self.optimizer.averaged_gradients.values()):
                raise RuntimeError(NO_GRADIENTS)
            return
        deepspeed_versions.wait_for_offload(self.optimizer)
        for shard in self.own:
            if self.optimizer.get_param_id(self.params[shard.param]) not in self.optimizer.norm_for_param_grads:
                self._chunk(shard).zero_()

    @abstractmethod
    def _chunk(self, shard: Shard) -> Tensor:
        """DeepSpeed's memory of a shard's gradient, padding included."""

    @abstractmethod
    def _replace(self, shard: Shard, gradient: Tensor) -> None:
        """Replace an fp16 gradient by an fp32 one."""

    def stored(self, shard: Shard) -> Tensor:
        return self._chunk(shard).narrow(0, 0, shard.numel)

    def store(self, shard: Shard, gradient: Tensor) -> None:
        if not self.offloads and not self.in_place:
            self._replace(shard, gradient)
            return
        self.stored(shard).copy_(gradient)
        if self.offloads:  # DeepSpeed clips by norms that it cached in the backward
            param_id = self.optimizer.get_param_id(self.params[shard.param])
            self.optimizer.norm_for_param_grads[param_id] = gradient.double().norm()

    # self-test: filled and consumed by DeepSpeed's own functions

    def _flat(self, group: int) -> Tensor:
        return self.optimizer.flatten(self.optimizer.averaged_gradients[group])

    def consume(self) -> list[Tensor]:
        groups = range(len(self.groups))
        flats = [self.masters[group].grad if self.offloads else self._flat(group) for group in groups]
        return [flat.to(torch.float32, copy=True) for flat in flats]

    def clear(self) -> None:
        if not self.offloads:
            self.optimizer.averaged_gradients.clear()  # the dict itself: DeepSpeed has linked parameters to it
            return
        self.optimizer.norm_for_param_grads.clear()
        for flat in self.masters:
            flat.grad.zero_()


class Stage12(ZeroLayout):
    """Gradients in DeepSpeedZeroOptimizer's flat buffers: a slice of every parameter group on every rank."""

    OFFLOADS, MASTERS = "cpu_offload", "single_partition_of_fp32_groups"
    last_first = True

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self._linked, optimizer = False, self.optimizer
        if optimizer.round_robin_gradients and not deepspeed_versions.is_aligned(optimizer):
            self.faults += (
                "with round_robin_gradients safe_get_full_* and universal checkpoints read other parameters",
            )
        micro_batches = engine.gradient_accumulation_steps()
        if self.offloads:
            self.faults += deepspeed_versions.offload_faults(micro_batches)
        else:
            self.faults += deepspeed_versions.accumulation_faults(optimizer, micro_batches)
        if deepspeed_versions.applies_nonfinite(optimizer):
            self.faults += ("in bf16 it applies gradients that are not finite, unless bf16.check_grad_overflow is set",)

    def _shards(self) -> list[Shard]:
        optimizer, shards = self.optimizer, list[Shard]()
        self._entry_of: dict[Shard, int] = {}
        index = {id(param): number for number, param in enumerate(self.params)}
        # round_robin_bit16_* hold the order in the flat buffer, whether or not round_robin_gradients is on
        for group, params in enumerate(optimizer.round_robin_bit16_groups):
            size = int(optimizer.partition_size[group])
            for param, offset in zip(params, deepspeed_versions.offsets(optimizer, group), strict=True):
                if id(param) in index:
                    shards += partition_flat(param.numel(), index[id(param)], group, offset, size, self.world)
        return shards

    def end(self) -> None:
        """Link parameters to their optimizer states again: in its first step DeepSpeed does so when only the first
        group has been stepped, and the others have no states yet."""
        self._linked = self._linked or deepspeed_versions.link_states(self.optimizer)

    def _entry(self, shard: Shard) -> int:
        """Index of the list's entry that starts at the shard's offset in this rank's slice; cached."""
        entries, cached = self.optimizer.averaged_gradients[shard.group], self._entry_of.get(shard)
        if cached is not None and entries[cached].numel() == shard.numel:
            return cached
        starts = accumulate((entry.numel() for entry in entries), initial=0)
        for index, start in zip(range(len(entries)), starts, strict=False):
            if start == shard.offset and entries[index].numel() == shard.numel:
                self._entry_of[shard] = index
                return index
        raise RuntimeError(
            f"ds_kfac: ZeRO-{1 + self.optimizer.partition_gradients} group {shard.group} has no gradient of "
            f"{shard.numel} elements at offset {shard.offset}; this DeepSpeed lays gradients out differently, "
            "use a version that docs/supported.md names"
        )

    def stored(self, shard: Shard) -> Tensor:
        if self.offloads:
            return self.masters[shard.group].grad.narrow(0, shard.offset, shard.numel)
        return self.optimizer.averaged_gradients[shard.group][self._entry(shard)].reshape(-1)

    _chunk = stored  # no padding

    def _replace(self, shard: Shard, gradient: Tensor) -> None:
        entries, index = self.optimizer.averaged_gradients[shard.group], self._entry(shard)
        if getattr(entries, "flat_partition", None) is not None:  # the step reads this buffer, not the list
            entries[index].view(-1).copy_(gradient)
        else:
            entries[index] = gradient.view(entries[index].shape)

    def install(self, known: KnownGradient) -> None:
        optimizer = self.optimizer
        for group, params in enumerate(optimizer.params_in_partition):
            if self.offloads:
                attribute = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
                for param in params:
                    setattr(param, attribute, known(param).view(param.shape).to(param.device, param.dtype))
                    optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)
                deepspeed_versions.wait_for_offload(optimizer)
            elif (buffer := deepspeed_versions.compact_buffer(optimizer, group)) is not None:
                self._install_compact(group, known, buffer)
            else:
                gradients = [known(p).view(p.shape).to(p.device, self.dtype) for p in params]
                optimizer.averaged_gradients[group] = deepspeed_versions.flat_partition(optimizer, group, gradients)

    def _install_compact(self, group: int, known: KnownGradient, buffer: Any) -> None:
        optimizer = self.optimizer
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[group])
        optimizer.averaged_gradients[group] = buffer
        for param in optimizer.params_in_partition[group]:
            param_id = optimizer.get_param_id(param)
            start = int(optimizer.grad_start_offset[group][rank][param_id])
            offset = int(optimizer.grad_partition_insertion_offset[group][rank][param_id])
            flat = optimizer.averaged_gradients[group].flat_partition
            numel = min(param.numel() - start, flat.numel() - offset)
            flat.narrow(0, offset, numel).copy_(known(param).narrow(0, start, numel))

    def _flat(self, group: int) -> Tensor:
        flat = deepspeed_versions.preflattened(self.optimizer, group)
        return super()._flat(group) if flat is None else flat

    def clear(self) -> None:
        super().clear()
        deepspeed_versions.forget_gradients(self.optimizer)

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        optimizer = engine.optimizer
        if cls.offloaded(optimizer):
            waits = bool(optimizer.norm_for_param_grads) or deepspeed_versions.accumulated_on_host(optimizer)
        else:
            waits = any(gradient is not None for gradient in deepspeed_versions.accumulated(optimizer))
        return waits or super().is_waiting(engine)


class Stage3(ZeroLayout):
    """Gradients in DeepSpeedZeroOptimizer_Stage3's partitions: a chunk of every parameter on every rank."""

    OFFLOADS, MASTERS = "offload_optimizer", "fp32_partitioned_groups_flat"

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self._chunks: list[Tensor] = []
        self.faults += deepspeed_versions.gather_faults(torch.distributed.get_backend(self.group))
        if not self.offloads:
            self.faults += (
                "a parameter outside of K-FAC layers that a step does not use is stepped with its last gradient again",
            )

    def _shards(self) -> list[Shard]:
        shards = []
        for index, param in enumerate(self.params):
            offset = self.optimizer.grad_position[self.optimizer.get_param_id(param)][1]
            shards += partition_chunks(param.ds_numel, index, self.position[id(param)][0], offset, self.world)
        return shards

    def group_index(self, param: nn.Parameter) -> int:
        return self.optimizer.sub_group_to_group_id[self.position[id(param)][0]]

    def begin(self) -> None:
        super().begin()
        self._chunks = [] if self.offloads else [self._chunk(shard) for shard in self.own]

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        # its buffers do not tell: they keep the last step's gradient until the next backward overwrites it
        return deepspeed_versions.accumulated_at_stage_3(engine.optimizer)

    def end(self) -> None:
        """Clear gradients: DeepSpeed would step a parameter that the next step does not use with its old one."""
        while self._chunks:
            self._chunks.pop().zero_()

    def _chunk(self, shard: Shard) -> Tensor:
        param = self.params[shard.param]
        if self.offloads:
            return self.masters[shard.group].grad.narrow(0, shard.offset, param.partition_numel())
        return self.optimizer.averaged_gradients[shard.group][self.position[id(param)][1]].view(-1)

    def _replace(self, shard: Shard, gradient: Tensor) -> None:
        padding = self._chunk(shard).numel() - shard.numel
        padded = torch.nn.functional.pad(gradient, (0, padding)) if padding else gradient
        self.optimizer.averaged_gradients[shard.group][self.position[id(self.params[shard.param])][1]] = padded

    def install(self, known: KnownGradient) -> None:
        optimizer = self.optimizer
        for group, params in enumerate(self.groups):
            chunks = []
            for param in params:
                size, full = param.partition_numel(), known(param)
                part = full[self.rank * size : (self.rank + 1) * size].to(self.dtype)
                chunks.append(torch.nn.functional.pad(part, (0, size - len(part))))
            if self.offloads:
                self.masters[group].grad.copy_(optimizer.flatten(chunks))
            else:
                optimizer.averaged_gradients[group] = chunks
