"""Interface of an engine mode: reads and writes gradient shards where DeepSpeed keeps them. Below it the modes in which
every rank holds every averaged gradient: stage 0, in ``p.grad``, and BF16_Optimizer."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial, reduce
from operator import attrgetter, methodcaller
from types import MethodType
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor, nn

from ds_kfac.update.rotation import lengths
from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.shards import ParamPart, Shard, ShardMap, entries

KnownGradient = Callable[[nn.Parameter], Tensor]
"""Parameter -> its full flat gradient, for the self-test."""


class ShardLayout(ABC):
    """One engine mode. Reads and writes happen at ``_take_model_step``: gradients are averaged over ranks and
    micro-batches, still carry the loss scale, and nothing has been checked, clipped or stepped.

    Args:
        engine: a DeepSpeedEngine.
        params: the preconditioned parameters.
        group: the ranks that average their gradients.
        pieces: parts of parameters that are read and written separately; None: whole parameters.

    Attributes:
        whole: shards of the whole parameters, as DeepSpeed keeps them.
        shards: shards of the pieces.
        own: this rank's shards of the whole parameters.
        averaged_over: number of ranks whose gradients are averaged.
        divisor: DeepSpeed divides the sum of the ranks' gradients by it.
        groups: parameters by the optimizer's group.
        position: id of a parameter -> (its group, its number there).
    """

    clips_scaled = False
    """Whether DeepSpeed clips gradients that still carry the loss scale."""
    replicated = False
    """Whether every rank holds every averaged gradient."""
    last_first = False
    """Whether gradients lie in memory in the order in which a backward makes them."""
    faults: tuple[str, ...] = ()
    """Known upstream faults of this mode, for the attach report."""
    grad_scaler: Any | None = None
    """torch_autocast fp16's GradScaler, which skips steps without telling the engine."""
    clipping: tuple[str, str, Any] = ("optimizer", "clip_grad", 0.0)
    """Attribute of the engine, attribute of that, and the value with which DeepSpeed clips nothing."""
    bound: Callable[[Any], float] = attrgetter("optimizer.clip_grad")
    """Of an engine: by which norm it clips now; 0: by none. A loaded checkpoint may have another than the config."""

    def __init__(
        self, engine: Any, params: Sequence[nn.Parameter], group: Any, pieces: Sequence[ParamPart] | None = None
    ) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.params: tuple[Any, ...] = tuple(params)  # Any: DeepSpeed adds ds_shape and others to parameters
        self.group, self.world, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        averages_sequence = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
        if engine.sequence_parallel_size > 1 and not averages_sequence:
            self.faults += (
                f"it sums gradients over the {engine.sequence_parallel_size} ranks of a sequence instead of averaging: "
                "right for a loss that is a mean over the whole sequence, that many times too large for one over a "
                "rank's own tokens",
            )
        if engine.pipeline_parallelism:
            self.faults += deepspeed_versions.pipeline_faults(engine.gradient_accumulation_steps())
        summed = 1 if averages_sequence else engine.sequence_parallel_size
        # also for experts' gradients, which fewer ranks have
        self.averaged_over = dist.get_world_size(engine.seq_data_parallel_group)
        self.divisor = self.averaged_over / summed
        self.groups = parameter_groups(self.optimizer)
        self.position = {id(p): (group, at) for group, ps in enumerate(self.groups) for at, p in enumerate(ps)}
        self.whole = ShardMap(self.world, tuple(self._numel(p) for p in self.params), tuple(self._shards()))
        self.pieces = tuple(ParamPart(index) for index in range(len(self.params))) if pieces is None else tuple(pieces)
        self.shards = self.whole.cut(self.pieces)
        self.own = self.whole.on(self.rank)
        self.staged: dict[Shard, tuple[Tensor, list[int]]] = {}

    @staticmethod
    def _numel(param: nn.Parameter) -> int:
        return getattr(param, "ds_numel", param.numel())

    def _shards(self) -> list[Shard]:
        """All shards of all ranks, without communication; here, every rank holds every gradient."""
        return [
            Shard(index, 0, self._numel(param), rank, self.group_index(param), 0)
            for index, param in enumerate(self.params)
            for rank in range(self.world)
        ]

    @abstractmethod
    def stored(self, shard: Shard) -> Tensor:
        """Gradient of this rank's shard of :attr:`whole`, flat, in DeepSpeed's dtype and on its device."""

    @abstractmethod
    def store(self, shard: Shard, gradient: Tensor) -> None:
        """Put a flat fp32 gradient where the optimizer will read it. Only :attr:`in_place` it may be rounded."""

    @cached_property
    def in_place(self) -> bool:
        """Whether results overwrite the gradient's memory, of which :meth:`stored` is a view. They are rounded to bf16
        if gradients are kept in that; fp16 has too small a range for results."""
        return False

    def param_of(self, piece: int) -> Any:
        """The parameter that a piece is part of."""
        return self.params[self.pieces[piece].param]

    def span(self, piece: int) -> tuple[int, int]:
        """(first element of a piece in its parameter, number of its elements)"""
        param = self.pieces[piece].param
        return self.pieces[piece].span(self.whole.numels[param])

    def read(self, shard: Shard) -> Tensor:
        """Gradient of this rank's shard of :attr:`shards`, as :meth:`stored`."""
        around, start = self.around[shard]
        return self.stored(around).narrow(0, start, shard.numel)

    def write(self, shard: Shard, gradient: Tensor) -> None:
        """:meth:`store` for a shard of :attr:`shards`, where results are not written in place: a shard of :attr:`whole`
        is stored once all its pieces have been written."""
        around, start = self.around[shard]
        if shard.numel == around.numel:
            self.store(around, gradient)
            return
        if around not in self.staged:
            self.staged[around] = gradient.new_empty(around.numel), [around.numel]
        staged, missing = self.staged[around]
        staged.narrow(0, start, shard.numel).copy_(gradient)
        missing[0] -= shard.numel
        if not missing[0]:
            self.store(around, self.staged.pop(around)[0])

    @cached_property
    def around(self) -> Mapping[Shard, tuple[Shard, int]]:
        """This rank's shard of :attr:`shards` -> the shard of :attr:`whole` that contains it, and its start there."""
        own = {shard.param: shard for shard in self.own}  # a rank has one of each parameter at most
        pairs = ((shard, own[self.pieces[shard.param].param]) for shard in self.shards.on(self.rank))
        return {shard: (whole, shard.offset - whole.offset) for shard, whole in pairs}

    def group_index(self, param: nn.Parameter) -> int:
        """Number of the parameter's group in ``optimizer.param_groups``."""
        return self.position[id(param)][0]

    @cached_property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """dtype of stored gradients; they travel in it, without loss."""

    @property
    def rounded_to(self) -> set[torch.dtype]:
        """dtypes that gradients may be rounded to before they are stored. With torch_autocast ZeRO sends a Linear's
        gradient in 16 bits, even if the model runs it in fp32."""
        dtypes = {self.dtype, *(p.dtype for p in self.params), *map(deepspeed_versions.sent_in, self.params)}
        return dtypes | deepspeed_versions.reduced_in(self.engine)

    @property
    def quantized(self) -> bool:
        """Whether ZeRO++ may send gradients in 4 bits."""
        return self.engine.zero_optimization_stage() == 3 and self.engine.zero_quantized_gradients()

    def begin(self) -> None:  # noqa: B027  most modes have nothing pending
        """Wait for gradients that DeepSpeed copies in the background."""

    def end(self) -> None:  # noqa: B027  most modes leave nothing behind
        """After DeepSpeed's step, whether it was applied or not."""

    def grad_scale(self) -> Tensor | float:
        """DeepSpeed will divide gradients by it before its optimizer sees them. Never synchronises."""
        return scaler_scale(self.grad_scaler) if self.grad_scaler else 1.0

    def clip_factor(self, norm: Tensor) -> Tensor:
        """DeepSpeed's clipping will multiply gradients by it. ``norm``: global norm of the stored gradients."""
        norm = norm if self.clips_scaled else norm / self.grad_scale()
        return (self.bound(self.engine) / (norm + 1e-6)).clamp(max=1.0)

    def unclipped(self) -> AbstractContextManager[None]:
        """Wraps DeepSpeed's step, which then clips nothing."""
        where, name, nothing = self.clipping
        return deepspeed_versions.replaced(getattr(self.engine, where) if where else self.engine, name, nothing)

    def multiply(self, factor: Tensor) -> None:
        """Multiply this rank's shards by a scalar."""
        for shard in self.own:
            gradient = self.stored(shard)
            self.store(shard, gradient.float() * factor.to(gradient.device))

    def squared_norm(self, shards: Sequence[Shard] | None = None) -> Tensor:
        """Squared norm of this rank's stored shards, or of some ``shards``; float64 scalar on the device, as squares of
        finite gradients may overflow fp32."""
        gradients = [self.stored(shard) for shard in (self.own if shards is None else shards)]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.engine.device)
        return lengths(gradients).square().sum().to(self.engine.device)

    def manual_scale(self) -> Tensor | float:
        """``engine.scale(loss)`` multiplies a loss by it."""
        return self.grad_scale()

    def backward_scale(self, announced: bool) -> Tensor | float:
        """The loss scale in a backward pass: of ``engine.backward``, or of a plain one, which only newer versions of
        DeepSpeed scale."""
        scales = announced or deepspeed_versions.manual_backward(self.engine)
        return self.manual_scale() if scales else 1.0

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        """Whether this rank has a gradient that waits for a step, which the self-test would overwrite."""
        gradients = ((p.grad, getattr(p, "grad_accum", None)) for p in engine.module.parameters())
        return any(bool(gradient.norm()) for pair in gradients for gradient in pair if gradient is not None)

    def guard_states(self, refuse: Callable[[str], Any]) -> None:
        """Make DeepSpeed's ``safe_get_full_optimizer_state`` and ``safe_set_full_optimizer_state`` call ``refuse`` with
        the state's name, which raises on every rank: the optimizer has no states of these parameters. DeepSpeed alone
        would fail on ranks that hold a part of the parameter, while the others wait for ever."""
        for param in self.params:
            for name in ("get_full_hp_param", "set_full_hp_param"):  # of ZeRO-1/2 and BF16_Optimizer
                if isinstance(plain := getattr(param, name, None), MethodType):
                    setattr(param, name, partial(_guarded, plain, refuse))

    # for the self-test

    @abstractmethod
    def install(self, known: KnownGradient) -> None:
        """Fill DeepSpeed's gradient buffers as its reduction would if ``known`` were the averaged gradients."""

    @abstractmethod
    def consume(self) -> list[Tensor]:
        """Copies of the flat fp32 gradients that DeepSpeed's step would now give its inner optimizer."""

    @abstractmethod
    def clear(self) -> None:
        """Reset the gradient buffers to their state before a first backward; they stay the same objects."""


def _guarded(plain: Callable[..., Any], refuse: Callable[[str], Any], *args: Any, **kwargs: Any) -> Any:
    key = inspect.signature(plain).bind(*args, **kwargs).arguments.get("optim_state_key")
    return plain(*args, **kwargs) if key is None else refuse(key)


def parameter_groups(optimizer: Any) -> list[list[Any]]:
    """The model's parameters by optimizer group; ZeRO's param_groups hold flat slices in their place."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if (groups := getattr(optimizer, attribute, None)) is not None:
            return groups
    return [group["params"] for group in optimizer.param_groups]


def scaler_scale(scaler: Any) -> Tensor | float:
    """A torch GradScaler's scale, on its device: ``get_scale()`` would synchronise."""
    scale = scaler._scale
    return scaler._init_scale if scale is None else scale


class Replicated(ShardLayout):
    """The bare torch (or DeepSpeed fused/CPU) optimizer; fp32 or torch_autocast."""

    replicated, masters = True, False  # fp32 masters, which take fp32 gradients
    clipping = ("", "clip_fp32_gradients", lambda: None)
    bound: Any = methodcaller("gradient_clipping")

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self.grad_scaler = deepspeed_versions.grad_scaler(engine)
        self._trained = [param for group in self.groups for param in group if param.requires_grad]
        self._before: list[Tensor | None] = []
        if engine.pipeline_parallelism and engine.gradient_clipping():
            self.faults += ("at stage 0 it clips every pipeline stage by the norm of the first one's gradients alone",)

    @cached_property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, map(attrgetter("dtype"), self.params))

    def squared_norm(self, shards: Sequence[Shard] | None = None) -> Tensor:
        return super().squared_norm([x for x in self.own if self.params[x.param].grad is not None])  # not made zeros

    def stored(self, shard: Shard) -> Tensor:
        param = self.params[shard.param]
        return param.new_zeros(param.numel()) if param.grad is None else entries(param)

    def store(self, shard: Shard, gradient: Tensor) -> None:
        if (param := self.params[shard.param]).grad is not None and param.grad.is_sparse:
            entries(param).copy_(gradient)
        elif param.grad is not None:  # DeepSpeed skips a parameter without a gradient
            # by .data: torch refuses to assign an fp32 gradient to a 16-bit parameter
            param.grad.data = gradient.view(param.shape).to(gradient.dtype if self.masters else param.dtype)

    def install(self, known: KnownGradient) -> None:
        if not self._before:
            self._before = [param.grad for param in self._trained]
        for param in self._trained:
            param.grad = known(param).view(param.shape).to(param.dtype)

    def consume(self) -> list[Tensor]:
        return [param.grad.detach().to(torch.float32, copy=True).view(-1) for param in self._trained]

    def clear(self) -> None:
        for param, gradient in zip(self._trained, self._before, strict=False):
            param.grad = gradient  # zeros or None
        self._before = []


class ReplicatedHalf(Replicated):
    """FP16_Optimizer and FP16_UnfusedOptimizer, used for bf16, too: fp32 masters, 16-bit ``p.grad``."""

    clipping, bound, masters = ShardLayout.clipping, ShardLayout.bound, True

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        if deepspeed_versions.lacks_loss_scale(self.optimizer):
            self.faults += (
                "at stage 0 fp16 it divides gradients by a loss scale it never multiplied by (deepspeed PR 8393): "
                "steps of SGD are too small by it, and clipping sees a norm that is",
            )

    def grad_scale(self) -> float:
        return deepspeed_versions.loss_scale(self.optimizer)

    def end(self) -> None:
        self.optimizer.zero_grad()  # up to 0.18.0 DeepSpeed keeps bf16 gradients and adds the next step's to them

    def manual_scale(self) -> float:
        return self.grad_scale() if deepspeed_versions.multiplies_loss(self.optimizer) else 1.0


class BF16(ShardLayout):
    """BF16_Optimizer (stage 1, bf16, fp32 accumulation): every rank holds every averaged gradient in fp32 copies.

    ``p.grad`` is only staging there; the norm is taken over all gradients, the step uses this rank's slice.
    """

    replicated = True

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self.faults += deepspeed_versions.bf16_optimizer_faults()

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.optimizer.grad_acc_dtype

    def _gradient(self, param: nn.Parameter) -> Tensor:
        group, position = self.position[id(param)]
        return self.optimizer.fp32_groups_gradients[group][position].view(-1)

    def stored(self, shard: Shard) -> Tensor:
        return self._gradient(self.params[shard.param])

    def store(self, shard: Shard, gradient: Tensor) -> None:
        self._gradient(self.params[shard.param]).copy_(gradient)

    def install(self, known: KnownGradient) -> None:
        for param in (param for params in self.groups for param in params):
            self._gradient(param).copy_(known(param))

    def consume(self) -> list[Tensor]:
        return [part.to(torch.float32, copy=True) for part in self.optimizer.fp32_groups_gradient_flat_partition]

    def clear(self) -> None:
        for flat in self.optimizer.fp32_groups_gradients_flat:
            flat.zero_()

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        # p.grad does not tell: it stays until the next backward, though it was added to fp32_groups_gradients long ago
        return any(map(any, engine.optimizer.fp32_groups_has_gradients))


def is_hooked(parameter: Any) -> bool:
    """Whether a hook that is neither DeepSpeed's nor ours gets a parameter's gradient: it may change it."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        for hook in (hooks or {}).values():
            while isinstance(hook, partial):
                hook = hook.func
            origin = getattr(inspect.unwrap(hook), "__module__", None) or type(hook).__module__
            if origin.partition(".")[0] not in ("deepspeed", "ds_kfac"):
                return True
    return False
