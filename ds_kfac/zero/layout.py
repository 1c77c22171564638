"""Interface of an engine mode (ZeRO stage and kind of optimizer). A mode knows where DeepSpeed
keeps gradients just before the inner optimizer steps (see ``seam.py``). This file also has the
modes of stage 0, in which every rank holds every averaged gradient."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from operator import attrgetter
from types import MethodType
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor, nn

from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.seam import Seam
from ds_kfac.zero.shards import ParameterPart, Shard, ShardMap, gapless_starts

KnownGradient = Callable[[nn.Parameter], Tensor]
"""Function that returns a parameter's whole flat gradient, for the self-test."""


class ShardLayout(ABC):
    """Where the gradients are in one engine mode.

    DeepSpeed gives its inner optimizer *masters*. A master is a parameter itself, an fp32 copy of a
    parameter, or a flat tensor with many parameters. ``shards.py`` explains shards, parts and
    spans.

    Args:
        engine: a DeepSpeedEngine.
        params: parameters of the model whose gradients the layout describes.
        group: process group of the ranks over which the gradients of ``params`` are averaged.
        parts: parts of the parameters that K-FAC reads and writes separately; None: whole
            parameters.
        seam: the engine's seam; None: a new one.

    Attributes:
        parts: parts of the parameters that K-FAC reads and writes separately.
        of_parameters: shards of whole parameters, as DeepSpeed keeps them. ``Shard.param`` is an
            index in ``params``.
        shards: shards of the parts. ``Shard.param`` is an index in ``parts``.
        own: shards of the parts on this rank.
        averaged_over: number of ranks whose gradients are averaged.
        divisor: number by which DeepSpeed divides the sum of the ranks' gradients.
        groups: for each parameter group of the optimizer, the list of its parameters.
        position: dict from a parameter to (index of its parameter group, index in this group).
    """

    replicated = False
    """Whether every rank holds every averaged gradient."""

    def __init__(
        self,
        engine: Any,
        params: Sequence[nn.Parameter],
        group: Any,
        parts: Sequence[ParameterPart] | None = None,
        seam: Seam | None = None,
    ) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.seam = Seam(engine) if seam is None else seam
        # Any, because DeepSpeed adds attributes such as ds_shape to parameters
        self.params: tuple[Any, ...] = tuple(params)
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.grad_scaler = deepspeed_versions.grad_scaler(engine)
        # DeepSpeed divides by the number of data ranks only. ZeRO-3 with reduce_scatter is the
        # exception: it also divides by the number of sequence ranks.
        averages_sequence = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
        summed = 1 if averages_sequence else engine.sequence_parallel_size
        # for experts the number is the same, although fewer ranks have gradients of an expert
        self.averaged_over = dist.get_world_size(engine.seq_data_parallel_group)
        self.divisor = self.averaged_over / summed
        self.groups = parameter_groups(self.optimizer)
        self.position = {
            p: (group, at) for group, ps in enumerate(self.groups) for at, p in enumerate(ps)
        }
        self.of_parameters = ShardMap(
            self.world, tuple(self._numel(p) for p in self.params), tuple(self._shards())
        )
        if parts is None:
            parts = [ParameterPart(index) for index in range(len(self.params))]
        self.parts = tuple(parts)
        self.shards = self.of_parameters.cut(self.parts)
        self.own = self.shards.on(self.rank)

    @staticmethod
    def _numel(param: nn.Parameter) -> int:
        return getattr(param, "ds_numel", param.numel())

    def _shards(self) -> list[Shard]:
        """Return the shards of all ranks, without communication. In this base class every rank
        holds every gradient."""
        on_first = [
            Shard(index, 0, self._numel(param), 0, self.group_index(param), self._offset(param))
            for index, param in enumerate(self.params)
        ]
        return [replace(shard, rank=rank) for shard in on_first for rank in range(self.world)]

    def _offset(self, param: nn.Parameter) -> int:
        """Return the index of the parameter's first element in its master."""
        return 0

    @abstractmethod
    def master(self, shard: Shard) -> Any:
        """Return the master that contains a shard of this rank. The shard begins at the master's
        element ``shard.offset``.

        Args:
            shard: a shard of :attr:`shards`.
        """

    def gradients(self) -> dict[Shard, Tensor]:
        """Return a dict from each shard of this rank to a flat view of its gradient (fp32 or bf16).

        The views are in a master's ``grad``, or in the buffer from which DeepSpeed will form that
        ``grad``. DeepSpeed will still multiply :meth:`raw` gradients by the seam's factor.
        """
        return {shard: self._gradient(shard) for shard in self.own}

    def _gradient(self, shard: Shard) -> Tensor:
        return flat_gradient(self.master(shard)).narrow(0, shard.offset, shard.numel)

    def raw(self, shard: Shard) -> bool:
        """Return whether DeepSpeed will still multiply a shard's gradient by the seam's factor."""
        return False

    def lacks(self, param: Any) -> bool:
        """Return whether DeepSpeed will leave a parameter unchanged in this step, because the
        parameter's gradient was removed."""
        return False

    sends_raw = False
    """Whether gradients are sent raw (see "Raw gradients" in ``exchange.py``). Raw gradients are
    already rounded to the 16 bits in which they are sent, so sending them loses nothing."""

    def param_of(self, part: int) -> Any:
        """Return the parameter to which a part belongs. ``part`` is an index in :attr:`parts`."""
        return self.params[self.parts[part].param]

    def span(self, part: int) -> tuple[int, int]:
        """Return (index of the part's first element in its parameter, number of elements of the
        part)."""
        param = self.parts[part].param
        return self.parts[part].span(self.of_parameters.numels[param])

    def group_index(self, param: nn.Parameter) -> int:
        """Return the index of a parameter's group in the optimizer's ``param_groups``. Works for
        any parameter of the engine."""
        return self.position[param][0]

    @cached_property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the averaged gradients. Gradients are also sent in this dtype, so they are
        not rounded again."""

    @property
    def rounded_to(self) -> set[torch.dtype]:
        """The dtypes to which gradients may be rounded before they are stored. With torch_autocast,
        ZeRO sends a Linear's gradient in 16 bits, even if the model runs that Linear in fp32."""
        dtypes = {
            self.dtype,
            *(p.dtype for p in self.params),
            *map(deepspeed_versions.sent_in, self.params),
        }
        return dtypes | deepspeed_versions.reduced_in(self.engine)

    @property
    def quantized(self) -> bool:
        """Whether ZeRO++ may send gradients in 4 bits."""
        return self.engine.zero_optimization_stage() == 3 and self.engine.zero_quantized_gradients()

    def begin(self) -> None:  # noqa: B027  most modes have nothing pending
        """Prepare for a step, before DeepSpeed looks at its gradients."""

    def end(self) -> None:  # noqa: B027  most modes leave nothing behind
        """Clean up after DeepSpeed's step, whether it was applied or not."""

    def loss_scale(self) -> Tensor | float:
        """Return the factor by which ``engine.backward`` and ``engine.scale`` multiply a loss,
        without synchronising with the device."""
        return scaler_scale(self.grad_scaler) if self.grad_scaler else 1.0

    def backward_scale(self, announced: bool) -> Tensor | float:
        """Return the factor by which the loss of a backward pass was multiplied.

        Args:
            announced: True for ``engine.backward``; False for a plain ``loss.backward()``. In the
                latter case the loss was multiplied only if the user has called ``engine.scale``.
        """
        scales = announced or deepspeed_versions.manual_backward(self.engine)
        return self.loss_scale() if scales else 1.0

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        """Return whether this rank has a gradient that no step has applied yet. The self-test would
        overwrite such a gradient."""
        gradients = ((p.grad, getattr(p, "grad_accum", None)) for p in engine.module.parameters())
        return any(
            bool(gradient.norm()) for pair in gradients for gradient in pair if gradient is not None
        )

    def guard_states(self, refuse: Callable[[str], Any]) -> None:
        """Make DeepSpeed's ``safe_get_full_optimizer_state`` and ``safe_set_full_optimizer_state``
        raise an error on every rank, because the optimizer has no states for the layers'
        parameters.

        DeepSpeed itself would fail only on the ranks that hold a part of the parameter, and the
        other ranks would wait forever.

        Args:
            refuse: function that raises the error. It is called with the name of the optimizer
                state.
        """
        for param in self.params:
            # ZeRO-1/2 and BF16_Optimizer add these methods to parameters
            for name in ("get_full_hp_param", "set_full_hp_param"):
                plain = getattr(param, name, None)
                if isinstance(plain, MethodType):
                    setattr(param, name, partial(_guarded, plain, refuse))

    # for the self-test

    @abstractmethod
    def install(self, known: KnownGradient) -> None:
        """Fill DeepSpeed's gradient buffers with the gradients that ``known`` returns, as if they
        were the averaged gradients of a backward pass."""

    @abstractmethod
    def clear(self) -> None:
        """Reset the gradient buffers to their state before the first backward pass. The buffers
        stay the same objects."""


def _guarded(
    plain: Callable[..., Any], refuse: Callable[[str], Any], *args: Any, **kwargs: Any
) -> Any:
    key = inspect.signature(plain).bind(*args, **kwargs).arguments.get("optim_state_key")
    return plain(*args, **kwargs) if key is None else refuse(key)


def flat_gradient(master: Any) -> Tensor:
    """Return a flat view of a master's gradient. A gradient that is not contiguous, such as the
    gradient of a weight in channels_last, is made contiguous first."""
    if not master.grad.is_contiguous():
        master.grad.data = master.grad.contiguous()
    return master.grad.view(-1)


def parameter_groups(optimizer: Any) -> list[list[Any]]:
    """Return, for each of the optimizer's groups, the list of the model's parameters in it. ZeRO's
    ``param_groups`` cannot be used, because they have flat slices instead of parameters."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, attribute, None)
        if groups is not None:
            return groups
    return [group["params"] for group in optimizer.param_groups]


def scaler_scale(scaler: Any) -> Tensor | float:
    """Return a torch GradScaler's scale as a tensor on the device. (``get_scale()`` would
    synchronise.) Before the first loss, return the initial scale as a number."""
    scale = scaler._scale
    return scaler._init_scale if scale is None else scale


class Replicated(ShardLayout):
    """Stage 0. Every rank has every averaged gradient in the parameters' ``grad``."""

    replicated = True

    def __init__(self, engine: Any, *values: Any, **named: Any) -> None:
        super().__init__(engine, *values, **named)
        self._trained = [param for group in self.groups for param in group if param.requires_grad]
        self._before: list[Tensor | None] = []

    @cached_property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, map(attrgetter("dtype"), self.params))

    def install(self, known: KnownGradient) -> None:
        if not self._before:
            self._before = [param.grad for param in self._trained]
        for param in self._trained:
            param.grad = known(param).view(param.shape).to(param.dtype)

    def clear(self) -> None:
        for param, gradient in zip(self._trained, self._before, strict=False):
            param.grad = gradient  # zeros or None
        self._before = []


class Bare(Replicated):
    """Stage 0 with the bare torch (or DeepSpeed fused/CPU) optimizer, in fp32 or with
    torch_autocast. Masters are the parameters."""

    def master(self, shard: Shard) -> Any:
        return self.params[self.parts[shard.param].param]

    def lacks(self, param: Any) -> bool:
        # the gradient of a frozen parameter counts as zero
        return param.requires_grad and param.grad is None

    def _gradient(self, shard: Shard) -> Tensor:
        param = self.master(shard)
        if param.grad is None:
            return param.new_zeros(shard.numel)
        return super()._gradient(shard)


class Half(Replicated):
    """Stage 0 with FP16_Optimizer or FP16_UnfusedOptimizer, in fp16 or bf16.

    Masters are fp32 copies. FP16_Optimizer has one flat copy of each parameter group, and
    FP16_UnfusedOptimizer has a copy of each parameter. If a parameter has no gradient, its master's
    gradient is zero.
    """

    @property
    def _flat(self) -> Sequence[Tensor] | None:
        """FP16_Optimizer's flat masters, one for each group; None for FP16_UnfusedOptimizer."""
        return getattr(self.optimizer, "fp32_groups_flat", None)

    @cached_property
    def _offsets(self) -> dict[nn.Parameter, int]:
        """Dict from a parameter to the index of its first element in its group's flat master. Only
        for FP16_Optimizer."""
        offsets: dict[nn.Parameter, int] = {}
        for params in self.groups:
            offsets |= dict(zip(params, gapless_starts(params), strict=True))
        return offsets

    def _offset(self, param: nn.Parameter) -> int:
        return self._offsets[param] if self._flat else 0

    def master(self, shard: Shard) -> Any:
        group, place = self.position[self.params[self.parts[shard.param].param]]
        return self._flat[group] if self._flat else self.optimizer.fp32_groups[group][place]

    def end(self) -> None:
        # up to 0.18.0 DeepSpeed keeps bf16 gradients and adds the next step's gradients to them
        self.optimizer.zero_grad()

    def loss_scale(self) -> float:
        scale = deepspeed_versions.loss_scale(self.optimizer)
        return scale if deepspeed_versions.multiplies_loss(self.optimizer) else 1.0


def is_hooked(parameter: Any) -> bool:
    """Return whether a parameter has a gradient hook that is neither DeepSpeed's nor ours. Such a
    hook may change the gradient."""
    for hooks in (
        parameter._backward_hooks,
        getattr(parameter, "_post_accumulate_grad_hooks", None),
    ):
        for hook in (hooks or {}).values():
            while isinstance(hook, partial):
                hook = hook.func
            origin = getattr(inspect.unwrap(hook), "__module__", None) or type(hook).__module__
            if origin.partition(".")[0] not in ("deepspeed", "ds_kfac"):
                return True
    return False
