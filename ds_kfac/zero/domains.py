"""Model parallelism as K-FAC sees it: which parameters are averaged in which group of ranks.

A domain is such a group with its parameters. Layers are assigned, reduced and preconditioned inside it, as if it were
the whole job; only kl-clip's sum is taken over all of them, and a checkpoint holds all of them.

    parallelism       group                        domains of a rank        layers of other ranks
    none, Ulysses     sequence x data              one                      the same
    pipeline          data                         one, its stage's         other stages'
    tensor            data                         one, its shards'         other shards, copies of what is not cut
    experts           data; expert data            dense; one per ep_size   other experts
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size
from torch import nn

from ds_kfac.model.batch import is_autoep
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import SHARDS


@dataclass(frozen=True)
class Domain:
    """One group and what it trains.

    Attributes:
        name: "" if the job is one domain, else another one in every domain of it.
        params: the trained parameters.
        names: of them, in the engine's module.
        group: DeepSpeed's process group that averages their gradients.
        shard: (rank, size) among the ranks that hold shards of one weight.
        first_experts: names of the lists and stacks of experts here -> number of their first one among the mixture's.
    """

    name: str
    params: tuple[nn.Parameter, ...]
    names: frozenset[str]
    group: Any
    shard: tuple[int, int] = (0, 1)
    first_experts: Mapping[str, int] = field(default_factory=dict)

    def global_name(self, layer: LayerSpec) -> str:
        """Of a layer, another one for every layer of the job: as it is called in checkpoints."""
        if layer.kind in SHARDS:
            return f"{layer.name}.shard_{self.shard[0]}_of_{self.shard[1]}"
        for experts, first in self.first_experts.items():
            if layer.name.startswith(experts + "."):
                number, _, rest = layer.name.removeprefix(experts + ".").partition(".")
                return ".".join([experts, str(first + int(number)), *([rest] if rest else [])])
        return layer.name

    def saves(self, layer: LayerSpec) -> bool:
        """Whether this domain writes the layer into checkpoints: of those that have copies of it, the first."""
        return layer.copies == 1 or self.shard[0] == 0


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError if checkpoints would hold two layers under one name: at attach, not hours later at the first
    save."""
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(
            f"ds_kfac cannot attach: checkpoints would hold two layers under one name, {twice[0]!r}; rename one of the "
            "modules, or exclude it (kfac.layers.exclude)"
        )


def pipeline_stage(engine: Any) -> int | None:
    """Which stage of a pipeline this rank is; None without a pipeline of several."""
    if not isinstance(engine, PipelineEngine) or engine.num_stages == 1:
        return None
    return int(engine.stage_id)


def tensor_shard(engine: Any) -> tuple[int, int]:
    """(rank, size) among the ranks that hold shards of one weight."""
    mpu = engine.mpu
    # a pipeline's grid counts stages as model parallel, DeepSpeed's sequence parallel state sequence groups
    if mpu is None or isinstance(engine, PipelineEngine):
        return 0, 1
    if hasattr(mpu, "initialize_sequence_parallel") and not hasattr(mpu, "get_tensor_model_parallel_world_size"):
        return 0, 1
    return int(bwc_tensor_model_parallel_rank(mpu)), int(bwc_tensor_model_parallel_world_size(mpu))


def domains(engine: Any, params: Sequence[nn.Parameter]) -> tuple[Domain, ...]:
    """This rank's domains, the dense one first.

    Args:
        params: the optimizer's.
    """
    trained = tuple(p for p in params if p.requires_grad)
    stage, shard = pipeline_stage(engine), tensor_shard(engine)
    name = f"tensor_{shard[0]}" if shard[1] > 1 else "" if stage is None else f"stage_{stage}"
    mixtures: dict[str, list[Any]] = {}
    for p in trained:
        if is_moe_param(p):
            mixtures.setdefault(p.group_name, []).append(p)  # type: ignore[attr-defined]
    name = "dense" if mixtures else name
    names = {id(p): parameter for parameter, p in engine.module.named_parameters()}

    def make(name: str, params: Sequence[nn.Parameter], group: Any, **options: Any) -> Domain:
        return Domain(name, tuple(params), frozenset(names[id(p)] for p in params if id(p) in names), group, **options)

    dense = [p for p in trained if not is_moe_param(p)]
    found = [make(name, dense, engine.seq_data_parallel_group, shard=shard)]
    for mixture, experts in mixtures.items():
        rank = groups._get_expert_parallel_rank(mixture)
        group = groups._get_expert_data_parallel_group(mixture)
        first = _first_experts(engine.module, {id(p) for p in experts}, rank)
        found.append(make(f"experts_{mixture}_rank_{rank}", experts, group, first_experts=first))
    return tuple(found)


def _first_experts(model: nn.Module, params: set[int], rank: int) -> dict[str, int]:
    stacks = {
        f"{name}.experts.{stack}".lstrip("."): rank * len(p)
        for name, module in model.named_modules()
        if is_autoep(module)
        for stack, p in module.experts.named_parameters(recurse=False)
        if id(p) in params
    }
    return stacks | {
        f"{name}.deepspeed_experts": rank * len(module.deepspeed_experts)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "deepspeed_experts", None), nn.ModuleList)
        and any(id(p) in params for p in module.parameters())
    }
