"""What every engine mode has to offer: read and write gradient shards where DeepSpeed keeps them; and the modes where
every rank holds every averaged gradient: stage 0, in ``p.grad``, and BF16_Optimizer."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import MethodType
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor, nn

from ds_kfac.update.rotation import lengths
from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.shards import ParamPart, Shard, ShardMap

KnownGradient = Callable[[nn.Parameter], Tensor]
"""Parameter -> its full flat gradient, for the self-test."""


class ShardLayout(ABC):
    """One engine mode. Reads and writes happen at ``_take_model_step``: gradients are averaged over ranks and
    micro-batches, still carry the loss scale, and nothing has been checked, clipped or stepped.

    Args:
        engine: a DeepSpeedEngine.
        params: the preconditioned parameters.
        group: the ranks that average their gradients.
        pieces: what is read and written by itself; None: whole parameters.

    Attributes:
        whole: shards of the parameters, as DeepSpeed keeps them.
        shards: of the pieces.
        own: this rank's, of the whole.
        divisor: by which DeepSpeed divides the sum of the ranks' gradients.
        groups, place: parameters by the optimizer's group, and (group, place in it) of each by its id.
    """

    clips_scaled = False
    """Whether DeepSpeed clips gradients that still carry the loss scale."""
    replicated = False
    """Whether every rank holds every averaged gradient."""
    faults: tuple[str, ...] = ()
    """Known upstream faults of this mode, for the attach report."""
    grad_scaler: Any | None = None
    """torch_autocast fp16's GradScaler, which skips steps without telling the engine."""
    clipping: tuple[str, str, Any] = ("optimizer", "clip_grad", 0.0)
    """Attribute of the engine, attribute of that, and the value with which DeepSpeed clips nothing."""

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
        # experts' gradients, too, of which other ranks have none
        self.divisor = dist.get_world_size(engine.seq_data_parallel_group) / summed
        self.groups = parameter_groups(self.optimizer)
        self.place = {id(p): (group, at) for group, ps in enumerate(self.groups) for at, p in enumerate(ps)}
        self.whole = ShardMap(self.world, tuple(self._numel(p) for p in self.params), tuple(self._shards()))
        self.pieces = tuple(ParamPart(index) for index in range(len(self.params))) if pieces is None else tuple(pieces)
        self.shards = self.whole.cut(self.pieces)
        self.own = self.whole.on(self.rank)
        self._staged: dict[Shard, tuple[Tensor, list[int]]] = {}

    @staticmethod
    def _numel(param: nn.Parameter) -> int:
        return getattr(param, "ds_numel", param.numel())

    def _shards(self) -> list[Shard]:
        """All shards of all ranks, without communication; these where every rank holds every gradient."""
        return [
            Shard(index, 0, self._numel(param), rank, self.group_index(param), 0)
            for index, param in enumerate(self.params)
            for rank in range(self.world)
        ]

    @abstractmethod
    def stored(self, shard: Shard) -> Tensor:
        """A local shard's gradient, of :attr:`whole`, flat, in the dtype and on the device where DeepSpeed keeps it."""

    @abstractmethod
    def store(self, shard: Shard, gradient: Tensor) -> None:
        """Put a flat fp32 gradient where the optimizer will find it; unless it lies :attr:`in_place`, without rounding
        it to 16 bits."""

    @cached_property
    def in_place(self) -> bool:
        """Whether a result takes the place of the gradient, which :meth:`stored` is a view of: rounded to bf16 where
        gradients are kept so, as theirs would be. fp16 has too small a range for it."""
        return False

    def param_of(self, piece: int) -> Any:
        """The parameter of a piece."""
        return self.params[self.pieces[piece].param]

    def span(self, piece: int) -> tuple[int, int]:
        """Where a piece begins in its parameter, and its elements."""
        param = self.pieces[piece].param
        return self.pieces[piece].span(self.whole.numels[param])

    def read(self, shard: Shard) -> Tensor:
        """A local shard's gradient, of :attr:`shards`, as :meth:`stored`."""
        around, start = self.around[shard]
        return self.stored(around).narrow(0, start, shard.numel)

    def write(self, shard: Shard, gradient: Tensor) -> None:
        """As :meth:`store`. Pieces of one shard wait for each other unless they are written in place: it is written
        when all of it has come."""
        if self.in_place:
            self.read(shard).copy_(gradient)
            return
        around, start = self.around[shard]
        if shard.numel == around.numel:
            self.store(around, gradient)
            return
        if around not in self._staged:
            self._staged[around] = torch.empty(around.numel, device=gradient.device), [around.numel]
        staged, missing = self._staged[around]
        staged.narrow(0, start, shard.numel).copy_(gradient)
        missing[0] -= shard.numel
        if not missing[0]:
            self.store(around, self._staged.pop(around)[0])

    @cached_property
    def around(self) -> Mapping[Shard, tuple[Shard, int]]:
        """Of this rank's :attr:`shards`: the shard of :attr:`whole` in which it lies, and where in it."""
        found = {}
        for shard in self.shards.on(self.rank):
            first = self.span(shard.param)[0] + shard.start
            for around in self.whole.of_param[self.pieces[shard.param].param]:
                if around.rank == self.rank and around.start <= first < around.start + around.numel:
                    found[shard] = around, first - around.start
        return found

    def group_index(self, param: nn.Parameter) -> int:
        """Which of ``optimizer.param_groups`` holds the parameter."""
        return self.place[id(param)][0]

    @cached_property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """In which gradients are stored at the hook; the gather sends them so, without loss."""

    @property
    def rounded_to(self) -> set[torch.dtype]:
        """What gradients may be rounded to on their way there. With torch_autocast ZeRO sends those of a Linear in 16
        bits, also of one that the model runs in fp32."""
        wire = getattr(self.engine, "communication_data_type", None)
        found = {self.dtype, *(p.dtype for p in self.params), *map(deepspeed_versions.sent_in, self.params)}
        return found | ({wire} if isinstance(wire, torch.dtype) else set())

    @property
    def quantized(self) -> bool:
        """Whether ZeRO++ may send gradients in 4 bits."""
        return self.engine.zero_optimization_stage() == 3 and self.engine.zero_quantized_gradients()

    def begin(self) -> None:  # noqa: B027  most modes have nothing pending
        """Wait for what DeepSpeed still copies in the background."""

    def end(self) -> None:  # noqa: B027  most modes leave nothing behind
        """After DeepSpeed's step, whether it was applied or not."""

    def grad_scale(self) -> Tensor | float:
        """By what DeepSpeed will divide the gradient before its optimizer sees it. Never synchronises."""
        return scaler_scale(self.grad_scaler) if self.grad_scaler else 1.0

    def clip_factor(self, norm: Tensor) -> Tensor:
        """By what DeepSpeed's clipping will multiply gradients whose global norm, as stored, is ``norm``."""
        norm = norm if self.clips_scaled else norm / self.grad_scale()
        return (self.engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Around DeepSpeed's step: gradients are clipped already."""
        where, name, nothing = self.clipping
        holder = getattr(self.engine, where) if where else self.engine
        before = vars(holder).get(name)
        setattr(holder, name, nothing)
        try:
            yield
        finally:
            restore(holder, name, before)

    def multiply(self, factor: Tensor) -> None:
        """This rank's shards, by a scalar."""
        for shard in self.own:
            gradient = self.stored(shard)
            self.store(shard, gradient.float() * factor.to(gradient.device))

    def squared_norm(self, shards: Sequence[Shard] | None = None) -> Tensor:
        """Of this rank's shards as stored, float64 scalar on the device, as squares of finite gradients are not always
        finite in fp32; of all gradients where they are replicated. ``shards``: of which, if not of all."""
        gradients = [self.stored(shard) for shard in (self.own if shards is None else shards)]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.engine.device)
        return lengths(gradients).square().sum().to(self.engine.device)

    def manual_scale(self) -> Tensor | float:
        """By what ``engine.scale(loss)`` multiplies a loss."""
        return self.grad_scale()

    def fallback_seed(self) -> Tensor | float:
        """The scale of a backward that did not go through ``engine.backward``, as DeepSpeed would have applied it."""
        scale = self.manual_scale() if deepspeed_versions.manual_backward(self.engine) else 1.0
        return scale / self.engine.gradient_accumulation_steps()

    @classmethod
    def is_waiting(cls, engine: Any) -> bool:
        """Whether an engine of this mode has a gradient here that no step has taken yet; the self-test would lose
        it."""
        gradients = ((p.grad, getattr(p, "grad_accum", None)) for p in engine.module.parameters())
        return any(bool(gradient.norm()) for pair in gradients for gradient in pair if gradient is not None)

    def guard_states(self, refuse: Callable[[str], Any]) -> None:
        """For parameters that the optimizer has no states of: DeepSpeed's ``safe_get_full_optimizer_state`` and
        ``safe_set_full_optimizer_state`` call ``refuse``, which raises, with a state's name on every rank. DeepSpeed
        alone fails where a piece of the parameter lies, and the other ranks wait for ever."""
        for param in self.params:
            for name in ("get_full_hp_param", "set_full_hp_param"):  # of ZeRO-1/2 and BF16_Optimizer
                if isinstance(plain := getattr(param, name, None), MethodType):
                    setattr(param, name, partial(_guarded, plain, refuse))

    # What the self-test needs.

    @abstractmethod
    def install(self, known: KnownGradient) -> None:
        """Fill DeepSpeed's gradient buffers as its own reduction would, were ``known`` the averaged gradient."""

    @abstractmethod
    def consume(self) -> list[Tensor]:
        """The flat fp32 gradients that DeepSpeed's step would hand to its inner optimizer now; copies."""

    @abstractmethod
    def clear(self) -> None:
        """Leave the gradient buffers as they are before a first backward, each of them the same object as before."""


def _guarded(plain: Callable[..., Any], refuse: Callable[[str], Any], *args: Any, **kwargs: Any) -> Any:
    key = inspect.signature(plain).bind(*args, **kwargs).arguments.get("optim_state_key")
    return plain(*args, **kwargs) if key is None else refuse(key)


def restore(holder: Any, name: str, before: Any) -> None:
    """Give an instance its attribute back; None: it had none of its own."""
    if before is None:
        delattr(holder, name)
    else:
        setattr(holder, name, before)


def parameter_groups(optimizer: Any) -> list[list[Any]]:
    """What DeepSpeed's or torch's optimizer steps; ZeRO's own param_groups hold flat slices instead."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if (groups := getattr(optimizer, attribute, None)) is not None:
            return groups
    return [group["params"] for group in optimizer.param_groups]


def scaler_scale(scaler: Any) -> Tensor | float:
    """A torch GradScaler's scale as it lies on the device: ``get_scale()`` would synchronise."""
    scale = scaler._scale
    return scaler._init_scale if scale is None else scale


class Replicated(ShardLayout):
    """The bare torch (or DeepSpeed fused/CPU) optimizer; fp32 or torch_autocast."""

    replicated = True
    clipping = ("", "clip_fp32_gradients", lambda: None)

    def __init__(self, engine, *values, **named) -> None:
        super().__init__(engine, *values, **named)
        self.grad_scaler = deepspeed_versions.grad_scaler(engine)
        self._trained = [param for group in self.groups for param in group if param.requires_grad]
        self._before: list[Tensor | None] = []
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
        if (param := self.params[shard.param]).grad is not None:  # if unused in this step, DeepSpeed will skip it
            # .data, because torch forbids a gradient of another dtype than its 16-bit parameter's
            param.grad.data = gradient.view(param.shape)

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
    """FP16_Optimizer and FP16_UnfusedOptimizer, which serve bf16 too; fp32 masters, 16-bit ``p.grad``."""

    clipping = ShardLayout.clipping

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
        self.optimizer.zero_grad()  # up to 0.18.0 DeepSpeed leaves those of bf16, and adds the next step's to them

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
        group, position = self.place[id(param)]
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
        # not p.grad: it is there until the next backward, where it was added to fp32_groups_gradients long ago
        return any(map(any, engine.optimizer.fp32_groups_has_gradients))


def is_hooked(parameter: Any) -> bool:
    """Whether a hook that is neither DeepSpeed's nor ours sees a parameter's gradient, and may change it."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        for hook in (hooks or {}).values():
            while isinstance(hook, partial):
                hook = hook.func
            origin = getattr(inspect.unwrap(hook), "__module__", None) or type(hook).__module__
            if origin.partition(".")[0] not in ("deepspeed", "ds_kfac"):
                return True
    return False
