"""An engine's domains, and the layout of its gradients.

A domain is a group of ranks together with the parameters whose gradients are averaged over these
ranks. K-FAC treats the layers of a domain as if the domain were the whole job. Only two things span
all domains: checkpoints, and the sum for kl-clip. The table shows the domains of each kind of
parallelism.

    parallelism     group               domains of a rank           layers of other ranks
    none, Ulysses   sequence x data     one                         the same layers
    pipeline        data                one: its stage              layers of other stages
    tensor          data                one: its shards             other shards; copied layers
    experts         data; expert data   one dense, one per ep_size  other experts
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size
from torch import nn

from ds_kfac.comm.message import gathered
from ds_kfac.model.layers import LayerSpec, is_autoep
from ds_kfac.model.registry import SHARDS
from ds_kfac.zero.deepspeed_versions import expert_data_parallel_group, expert_parallel_rank
from ds_kfac.zero.layout import Bare, Half, ShardLayout
from ds_kfac.zero.seam import Seam
from ds_kfac.zero.shards import ParameterPart
from ds_kfac.zero.stages import BF16, Stage3, Stage12


@dataclass(frozen=True)
class Domain:
    """A process group and the parameters whose gradients it averages.

    Attributes:
        name: name of the domain, unique in the job; "" if the job has only one domain.
        params: trained parameters of the domain.
        names: names of the parameters in the engine's module.
        group: DeepSpeed's process group that averages the parameters' gradients.
        shard: (index of this rank, number of ranks) in the group of ranks that hold the shards of a
            weight.
        first_experts: dict from the module name of a list or stack of experts to the index that
            this rank's first expert has among the experts of all ranks.
    """

    name: str
    params: tuple[nn.Parameter, ...]
    names: frozenset[str]
    group: Any
    shard: tuple[int, int] = (0, 1)
    first_experts: Mapping[str, int] = field(default_factory=dict)

    def global_name(self, layer: LayerSpec) -> str:
        """Return a layer's name in checkpoints, which is unique in the job."""
        if layer.kind in SHARDS:
            return f"{layer.name}.shard_{self.shard[0]}_of_{self.shard[1]}"
        for experts, first in self.first_experts.items():
            if layer.name.startswith(experts + "."):
                number, _, rest = layer.name.removeprefix(experts + ".").partition(".")
                return ".".join([experts, str(first + int(number)), *([rest] if rest else [])])
        return layer.name


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError if two layers have the same name in checkpoints. This function runs when
    K-FAC attaches, because otherwise the error would come only at the first save."""
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(
            "ds_kfac cannot attach: two layers would have the same name in checkpoints, "
            f"{twice[0]!r}; rename one of the modules, or exclude it (kfac.layers.exclude)"
        )


def tensor_shard(engine: Any) -> tuple[int, int]:
    """Return this rank's index among the ranks that hold shards of one weight, and the number of
    these ranks."""
    mpu = engine.mpu
    # A pipeline's grid counts stages as model parallelism, and DeepSpeed's sequence-parallel state
    # counts sequence groups as model parallelism. Neither stages nor sequence groups shard weights.
    if mpu is None or isinstance(engine, PipelineEngine):
        return 0, 1
    if hasattr(mpu, "initialize_sequence_parallel") and not hasattr(
        mpu, "get_tensor_model_parallel_world_size"
    ):
        return 0, 1
    return int(bwc_tensor_model_parallel_rank(mpu)), int(bwc_tensor_model_parallel_world_size(mpu))


def domains(engine: Any, params: Sequence[nn.Parameter]) -> tuple[Domain, ...]:
    """Return this rank's domains, with the domain of dense layers first. ``params`` are the
    optimizer's parameters."""
    trained = tuple(p for p in params if p.requires_grad)
    shard = tensor_shard(engine)
    mixtures: dict[str, list[Any]] = {}
    for p in trained:
        if is_moe_param(p):
            mixtures.setdefault(p.group_name, []).append(p)  # type: ignore[attr-defined]
    names = {p: parameter for parameter, p in engine.module.named_parameters()}

    def make(name: str, params: Sequence[nn.Parameter], group: Any, **options: Any) -> Domain:
        return Domain(
            name,
            tuple(params),
            frozenset(names[p] for p in params if p in names),
            group,
            **options,
        )

    dense = [p for p in trained if not is_moe_param(p)]
    name = _dense_name(engine, shard, has_experts=bool(mixtures))
    every_domain = [make(name, dense, engine.seq_data_parallel_group, shard=shard)]
    for mixture, experts in mixtures.items():
        rank = expert_parallel_rank(mixture)
        group = expert_data_parallel_group(mixture)
        first = _first_experts(engine.module, set(experts), rank)
        every_domain.append(
            make(f"experts_{mixture}_rank_{rank}", experts, group, first_experts=first)
        )
    return tuple(every_domain)


def _dense_name(engine: Any, shard: tuple[int, int], *, has_experts: bool) -> str:
    """Return the name of the domain of this rank's dense layers, or "" if the job has no other
    domain."""
    if has_experts:
        return "dense"
    if shard[1] > 1:
        return f"tensor_{shard[0]}"
    if isinstance(engine, PipelineEngine) and engine.num_stages > 1:
        return f"stage_{engine.stage_id}"
    return ""


def _first_experts(model: nn.Module, params: set[nn.Parameter], rank: int) -> dict[str, int]:
    stacks = {
        f"{name}.experts.{stack}".lstrip("."): rank * len(p)
        for name, module in model.named_modules()
        if is_autoep(module)
        for stack, p in module.experts.named_parameters(recurse=False)
        if p in params
    }
    return stacks | {
        f"{name}.deepspeed_experts": rank * len(module.deepspeed_experts)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "deepspeed_experts", None), nn.ModuleList)
        and any(p in params for p in module.parameters())
    }


SHARD_LAYOUTS: dict[type, type[ShardLayout]] = {
    DeepSpeedZeroOptimizer: Stage12,
    DeepSpeedZeroOptimizer_Stage3: Stage3,
    BF16_Optimizer: BF16,
    FP16_Optimizer: Half,
    FP16_UnfusedOptimizer: Half,
}
"""Dict from the exact class of ``engine.optimizer`` to the layout class of the engine mode.
:func:`shard_layout` raises an error if DeepSpeed wraps the optimizer in any other class."""


def is_waiting(engine: Any) -> bool:
    """Return whether any rank of an engine has a gradient that no step has applied yet.
    Collective."""
    layout = SHARD_LAYOUTS.get(type(engine.optimizer), Bare)
    return any(gathered(layout.is_waiting(engine)))


def shard_layout(
    engine: Any,
    params: Sequence[nn.Parameter],
    group: Any,
    parts: Sequence[ParameterPart] | None = None,
    seam: Seam | None = None,
) -> ShardLayout:
    """Return the layout of the engine's mode. Raise ValueError if DeepSpeed wraps the optimizer in
    a class that is not in :data:`SHARD_LAYOUTS`."""
    optimizer = engine.optimizer
    wrapper = type(engine.optimizer)
    is_wrapper = isinstance(optimizer, DeepSpeedOptimizer)
    is_bare = isinstance(optimizer, torch.optim.Optimizer) and not is_wrapper
    layout = SHARD_LAYOUTS.get(wrapper)
    if layout is None and is_bare and not engine.zero_optimization():
        layout = Bare
    if layout is None:
        raise ValueError(
            f"ds_kfac: DeepSpeed wrapped the optimizer in {wrapper.__module__}.{wrapper.__name__}, "
            "which ds_kfac does not know. It knows: "
            f"{', '.join(known.__name__ for known in SHARD_LAYOUTS)} and bare torch optimizers at "
            "ZeRO stage 0"
        )
    return layout(engine, params, group, parts, seam)
