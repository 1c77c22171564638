"""Model parallelism as K-FAC sees it: which parameters are averaged in which group of ranks.

A domain is such a group with its parameters. Layers are assigned, reduced and preconditioned inside it, as if it were
the whole job; only kl-clip's sum is taken over all of them.

    parallelism       group                        domains of a rank        layers of other ranks
    none, Ulysses     sequence x data              one                      the same
    pipeline          data                         one, its stage's         other stages'
    tensor            data                         one, its shards'         other shards, copies of what is not cut
    experts           data; expert data            dense; one per ep_size   other experts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size
from torch import nn


@dataclass(frozen=True)
class Domain:
    """Attributes:
    name: "" if the job is one domain, else another one in every domain of it: a folder of its checkpoints.
    params: the trained parameters.
    group: DeepSpeed's process group that averages their gradients.
    """

    name: str
    params: tuple[nn.Parameter, ...]
    group: Any


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
    stage = pipeline_stage(engine)
    shard, shards = tensor_shard(engine)
    name = f"tensor_{shard}" if shards > 1 else "" if stage is None else f"stage_{stage}"
    dense = tuple(p for p in trained if not is_moe_param(p))
    experts: dict[str, list[Any]] = {}
    for p in trained:
        if is_moe_param(p):
            experts.setdefault(p.group_name, []).append(p)  # type: ignore[attr-defined]
    found = [Domain(name, dense, engine.seq_data_parallel_group)]
    for group, params_of_group in experts.items():
        rank = groups._get_expert_parallel_rank(group)
        ranks = groups._get_expert_data_parallel_group(group)
        found.append(Domain(f"experts_{group}_rank_{rank}", tuple(params_of_group), ranks))
    return tuple(found)
