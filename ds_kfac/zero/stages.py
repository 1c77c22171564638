"""Engine modes with flat masters (the tensors that the inner optimizer updates). In these modes a
rank updates only its part of the parameters. ZeRO updates the masters one after the other.

With ZeRO-1/2 and BF16_Optimizer, every parameter group is one flat buffer that is cut into equal
slices, and a rank updates its slice. With ZeRO-3, every parameter is cut into ``world`` equal
chunks. The last chunks may contain padding. A master consists of this rank's chunks of all
parameters in one sub-group.

When ZeRO updates its first master, the gradients of the other masters are still raw: DeepSpeed has
not unscaled and clipped them yet. Without offload, raw gradients are in lists of tensors, which
DeepSpeed will concatenate to flat gradients. With offload, they are in the masters' ``grad``.
Before K-FAC writes a result to a list, it replaces an fp16 tensor in the list by an fp32 tensor,
because the result may be out of fp16's range. DeepSpeed's concatenation promotes dtypes, so the
result stays in fp32.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.layout import KnownGradient, ShardLayout
from ds_kfac.zero.shards import Shard, gapless_starts, partition_chunks, partition_flat

NO_GRADIENTS = (
    "ds_kfac: engine.step() has no gradients: call engine.backward(loss) between two steps"
)


def _flat_shards(
    layout: ShardLayout,
    groups: Sequence[Sequence[nn.Parameter]],
    sizes: Sequence[int],
    offsets: Sequence[Iterable[int]],
) -> list[Shard]:
    """Return the shards of the layout's parameters in flat buffers, one buffer for each group.

    Args:
        layout: the layout whose parameters count.
        groups: the parameters in each buffer.
        sizes: number of elements of each buffer that one rank holds.
        offsets: index in the buffer of the first element of each parameter.
    """
    index = {param: number for number, param in enumerate(layout.params)}
    shards: list[Shard] = []
    for group, (params, size, starts) in enumerate(zip(groups, sizes, offsets, strict=True)):
        for param, start in zip(params, starts, strict=True):
            if param in index:
                shards += partition_flat(
                    param.numel(), index[param], group, start, size, layout.world
                )
    return shards


class BF16(ShardLayout):
    """Stage 1 with BF16_Optimizer (bf16 parameters, fp32 accumulation). Every rank has every
    averaged gradient, but updates only its slice of the parameters."""

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.optimizer.grad_acc_dtype

    def _shards(self) -> list[Shard]:
        sizes = [part.numel() for part in self.optimizer.fp32_groups_flat_partition]
        offsets = [gapless_starts(params) for params in self.groups]
        return _flat_shards(self, self.groups, sizes, offsets)

    def master(self, shard: Shard) -> Any:
        return self.optimizer.fp32_groups_flat_partition[shard.group]

    def install(self, known: KnownGradient) -> None:
        for group, params in enumerate(self.groups):
            for param, gradient in zip(
                params, self.optimizer.fp32_groups_gradients[group], strict=True
            ):
                gradient.view(-1).copy_(known(param))
        self._mark(True)

    def _mark(self, has_gradients: bool) -> None:
        """Tell DeepSpeed whether its buffers have gradients."""
        for flags in self.optimizer.fp32_groups_has_gradients:
            flags[:] = [has_gradients] * len(flags)

    def clear(self) -> None:
        for flat in self.optimizer.fp32_groups_gradients_flat:
            flat.zero_()
        self._mark(False)

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        # p.grad does not show this. DeepSpeed adds p.grad to fp32_groups_gradients, but does not
        # remove p.grad until the next backward pass
        return any(map(any, engine.optimizer.fp32_groups_has_gradients))


class ZeroLayout(ShardLayout):
    """Base class of the layouts of ZeRO-1/2 and ZeRO-3.

    Attributes:
        offloads: whether DeepSpeed keeps gradients and masters on the host.
    """

    OFFLOADS = ""
    """Name of the DeepSpeed optimizer's attribute that tells whether it offloads."""
    MASTERS = ""
    """Name of the DeepSpeed optimizer's list of flat fp32 masters, one for each group or
    sub-group."""

    def __init__(self, engine: Any, *values: Any, **named: Any) -> None:
        super().__init__(engine, *values, **named)
        self.offloads = self.offloaded(self.optimizer)
        self.sends_raw = self.dtype.itemsize == 2 and not self.offloads

    @classmethod
    def offloaded(cls, optimizer: Any) -> bool:
        """Return whether DeepSpeed keeps gradients and masters on the host."""
        return bool(getattr(optimizer, cls.OFFLOADS))

    @cached_property
    def dtype(self) -> torch.dtype:
        if self.offloads:
            dtype = deepspeed_versions.master_dtype
        else:
            dtype = deepspeed_versions.gradient_dtype
        return dtype(self.optimizer)

    def loss_scale(self) -> Tensor | float:
        # a float, because the scale may be an int of 2**32 or more, and no integer tensor can hold
        # its square
        return super().loss_scale() if self.grad_scaler else float(self.optimizer.loss_scale)

    def begin(self) -> None:
        """Without offload, check that there are gradients. With offload, drop old gradients.

        Without offload, raise RuntimeError if there was no backward pass since the last step.
        Without this check, only ranks with layers would fail, and the other ranks would wait for
        them. With offload, zero the buffers of parameters that had no gradient in this step. These
        buffers still contain K-FAC's result of an earlier step, which K-FAC would otherwise
        precondition again.
        """
        if not self.offloads:
            if all(own is None for own in self.optimizer.averaged_gradients.values()):
                raise RuntimeError(NO_GRADIENTS)
            return
        deepspeed_versions.wait_for_offload(self.optimizer)
        for shard in self.own:
            param = self.params[self.parts[shard.param].param]
            # DeepSpeed's cached norms show which parameters had a gradient
            if self.optimizer.get_param_id(param) not in self.optimizer.norm_for_param_grads:
                self._gradient(shard).zero_()

    def master(self, shard: Shard) -> Any:
        return getattr(self.optimizer, self.MASTERS)[shard.group]

    def raw(self, shard: Shard) -> bool:
        return self.seam.factor is not None and shard.group >= self.seam.prepared

    def _gradient(self, shard: Shard) -> Tensor:
        if self.offloads or shard.group < self.seam.prepared:
            return super()._gradient(shard)
        entries, place, start = self._entry(shard)
        if entries[place].dtype is torch.float16:
            entries[place] = entries[place].float()
        return entries[place].view(-1).narrow(0, start, shard.numel)

    @abstractmethod
    def _entry(self, shard: Shard) -> tuple[list[Tensor], int, int]:
        """Return where a shard's raw gradient is: a list of tensors, the index of a tensor in the
        list, and the index of the gradient's first element in that tensor."""

    # for the self-test: DeepSpeed's own functions fill the buffers

    def _note_norm(self, param: Any, known: KnownGradient) -> None:
        """Store the norm of a parameter's gradient, as DeepSpeed does in a backward pass with
        offload. DeepSpeed clips by these norms."""
        self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = (
            known(param).double().norm()
        )

    def clear(self) -> None:
        if not self.offloads:
            # the dict is cleared, not replaced, because DeepSpeed has linked parameters to it
            self.optimizer.averaged_gradients.clear()
            return
        self.optimizer.norm_for_param_grads.clear()
        for flat in getattr(self.optimizer, self.MASTERS):
            flat.grad.zero_()


class Stage12(ZeroLayout):
    """ZeRO-1/2. DeepSpeedZeroOptimizer keeps a slice of every parameter group's flat buffer on
    every rank."""

    OFFLOADS = "cpu_offload"
    MASTERS = "single_partition_of_fp32_groups"

    def __init__(self, engine: Any, *values: Any, **named: Any) -> None:
        super().__init__(engine, *values, **named)
        self._linked = deepspeed_versions.states_are_linked(self.optimizer)
        self._starts: dict[int, list[int]] = {}

    def _shards(self) -> list[Shard]:
        optimizer = self.optimizer
        # the attributes round_robin_bit16_* have the order of the flat buffer, even if
        # round_robin_gradients is off
        groups = optimizer.round_robin_bit16_groups
        sizes = [int(size) for size in optimizer.partition_size]
        offsets = [deepspeed_versions.offsets(optimizer, group) for group in range(len(groups))]
        return _flat_shards(self, groups, sizes, offsets)

    def begin(self) -> None:
        self._starts.clear()
        super().begin()

    def end(self) -> None:
        """Link parameters to their optimizer states again after the first step. DeepSpeed links
        them too early, when only the first group has been updated and the other groups have no
        states yet."""
        self._linked = self._linked or deepspeed_versions.link_states(self.optimizer)

    def _entry(self, shard: Shard) -> tuple[list[Tensor], int, int]:
        gradients = self.optimizer.averaged_gradients
        group = shard.group
        flat = getattr(gradients[group], "flat_partition", None)
        if flat is not None:  # DeepSpeed reads this buffer and ignores the list
            gradients[group] = [flat]
        if group not in self._starts:
            *starts, end = accumulate((entry.numel() for entry in gradients[group]), initial=0)
            self._starts[group] = [*starts, end]
        starts = self._starts[group]
        place = bisect_right(starts, shard.offset) - 1
        if place >= len(starts) - 1 or shard.offset + shard.numel > starts[place + 1]:
            raise RuntimeError(
                f"ds_kfac: ZeRO-{1 + self.optimizer.partition_gradients} group {group} has no "
                f"gradient of {shard.numel} elements at offset {shard.offset}; this DeepSpeed lays "
                "gradients out differently, use a version that docs/reference/supported.md names"
            )
        return gradients[group], place, shard.offset - starts[place]

    def install(self, known: KnownGradient) -> None:
        optimizer = self.optimizer
        for group, params in enumerate(optimizer.params_in_partition):
            if self.offloads:
                attribute = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
                for param in params:
                    setattr(
                        param,
                        attribute,
                        known(param).view(param.shape).to(param.device, param.dtype),
                    )
                    optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)
                    self._note_norm(param, known)
                deepspeed_versions.wait_for_offload(optimizer)
            elif (buffer := deepspeed_versions.compact_buffer(optimizer, group)) is not None:
                self._install_compact(group, known, buffer)
            else:
                gradients = [known(p).view(p.shape).to(p.device, self.dtype) for p in params]
                optimizer.averaged_gradients[group] = deepspeed_versions.flat_partition(
                    optimizer, group, gradients
                )

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

    def clear(self) -> None:
        super().clear()
        deepspeed_versions.forget_gradients(self.optimizer)

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        optimizer = engine.optimizer
        if cls.offloaded(optimizer):
            waits = bool(optimizer.norm_for_param_grads) or deepspeed_versions.accumulated_on_host(
                optimizer
            )
        else:
            waits = any(
                gradient is not None for gradient in deepspeed_versions.accumulated(optimizer)
            )
        return waits or super().is_waiting(engine)


class Stage3(ZeroLayout):
    """ZeRO-3. DeepSpeedZeroOptimizer_Stage3 keeps a chunk of every parameter on every rank."""

    OFFLOADS = "offload_optimizer"
    MASTERS = "fp32_partitioned_groups_flat"

    def __init__(self, engine: Any, *values: Any, **named: Any) -> None:
        super().__init__(engine, *values, **named)
        self._chunks: list[Tensor] = []  # gradients of the current step
        # where each chunk is in averaged_gradients: (sub-group, index)
        self._places = [
            self.position[self.params[shard.param]] for shard in self.of_parameters.on(self.rank)
        ]

    def _shards(self) -> list[Shard]:
        shards: list[Shard] = []
        for index, param in enumerate(self.params):
            offset = self._chunk_start(param)
            shards += partition_chunks(
                param.ds_numel, index, self.position[param][0], offset, self.world
            )
        return shards

    def _chunk_start(self, param: Any) -> int:
        """Return the index of the first element of a parameter's chunk in its master."""
        return self.optimizer.grad_position[self.optimizer.get_param_id(param)][1]

    def group_index(self, param: nn.Parameter) -> int:
        return self.optimizer.sub_group_to_group_id[self.position[param][0]]

    def begin(self) -> None:
        super().begin()
        self._chunks = []
        if not self.offloads:
            gradients = self.optimizer.averaged_gradients
            self._chunks = [gradients[group][place] for group, place in self._places]

    def end(self) -> None:
        """Zero the gradients. Otherwise, if the next step does not use a parameter, DeepSpeed would
        update this parameter with its old gradient."""
        while self._chunks:
            self._chunks.pop().zero_()

    def _entry(self, shard: Shard) -> tuple[list[Tensor], int, int]:
        param = self.params[self.parts[shard.param].param]
        entries = self.optimizer.averaged_gradients[shard.group]
        return entries, self.position[param][1], shard.offset - self._chunk_start(param)

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        # the buffers do not show this, because they keep the last step's gradient until the next
        # backward pass overwrites it
        return deepspeed_versions.accumulated_at_stage_3(engine.optimizer)

    def install(self, known: KnownGradient) -> None:
        optimizer = self.optimizer
        for group, params in enumerate(self.groups):
            chunks = []
            for param in params:
                size = param.partition_numel()
                full = known(param)
                part = full[self.rank * size : (self.rank + 1) * size].to(self.dtype)
                chunks.append(torch.nn.functional.pad(part, (0, size - len(part))))
                if self.offloads:
                    self._note_norm(param, known)
            if self.offloads:
                master = optimizer.fp32_partitioned_groups_flat[group]
                master.grad.copy_(optimizer.flatten(chunks))
            else:
                optimizer.averaged_gradients[group] = chunks
