"""What model parallelism rules out: combinations with the rest of the config that would be wrong are refused."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from ds_kfac.adamw import KFACAdamWStep
from ds_kfac.agreement import failing_together
from ds_kfac.config import KFACConfig
from ds_kfac.layers.registry import SHARDS
from ds_kfac.planning import Plan
from ds_kfac.scan import Scan
from ds_kfac.target import Target
from ds_kfac.work import kept_bytes, packed_bytes
from ds_kfac.zero.domains import Domain, tensor_shard


def check(engine: Any, config: KFACConfig) -> None:
    """Raise ValueError naming every key that does not go with the engine's parallelism."""
    refused = []
    sharded = tensor_shard(engine)[1] > 1
    pipeline, adam = isinstance(engine, PipelineEngine), isinstance(engine.basic_optimizer, KFACAdamWStep)
    if pipeline and config.factor.fisher == "monte_carlo":
        refused.append(
            'kfac.factor.fisher "monte_carlo" with a pipeline: the sampled loss needs a second backward through all '
            'stages; use "empirical"'
        )
    if (pipeline or sharded or engine.has_moe_layers) and adam and engine.gradient_clipping():
        refused.append(
            "KFACAdamW with gradient_clipping and model parallelism: its moments are those of clipped gradients, and "
            'the norm over all ranks is not known before the step; set "gradient_clipping": 0'
        )
    counts = _group_counts(engine) if pipeline and adam and engine.zero_optimization() else []
    if len(set(counts)) > 1:
        refused.append(
            f"KFACAdamW with these pipeline stages: they have {counts} parameter groups, and ZeRO-1 takes "
            "a norm over all stages for each, for which it would wait for ever; give every stage preconditioned "
            "parameters and others, or none of the one kind (kfac.layers.types)"
        )
    if adam and engine.autotp_size() > 1:
        refused.append(
            "KFACAdamW with AutoTP: its parameter groups are made before AutoTP cuts the layers; use another "
            "optimizer, or layers that are made as shards (Megatron's)"
        )
    if sharded and config.factor.fisher == "monte_carlo":
        refused.append(
            'kfac.factor.fisher "monte_carlo" with tensor parallelism: ranks would draw other labels for one example; '
            'use "empirical"'
        )
    if engine.has_moe_layers:
        if config.factor.fisher == "monte_carlo":
            refused.append('kfac.factor.fisher "monte_carlo" with a mixture of experts: not tested; use "empirical"')
        if config.factor.weight_sharing == "reduce":
            refused.append(
                'kfac.factor.weight_sharing "reduce" with a mixture of experts: a sequence\'s tokens go to several '
                'experts; use "expand"'
            )
    if groups._get_sequence_parallel_world_size() > 1 and config.factor.weight_sharing == "reduce":
        refused.append(
            'kfac.factor.weight_sharing "reduce" with sequence parallelism: a sequence\'s rows lie on several ranks, '
            'and their sum is needed; use "expand"'
        )
    if refused:
        raise ValueError("ds_kfac cannot attach to this engine:\n  " + "\n  ".join(refused))


def _group_counts(engine: Any) -> list[int]:
    """Parameter groups on every rank. Collective."""
    counts = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(counts, len(engine.optimizer.param_groups))
    return counts


def agreeing(several: bool) -> AbstractContextManager:
    """Around work that may fail in some domains only: if there are several, it fails on all ranks then. Collective."""
    if not several:
        return nullcontext()
    headline = "ds_kfac cannot attach to this model-parallel engine"
    return failing_together(headline, torch.distributed.group.WORLD, ValueError)


def by_domain(found: Scan, domains: Sequence[Domain]) -> list[tuple[Domain, Scan]]:
    """The layers of each domain that has some; what was skipped, in the first of them."""
    pairs: list[tuple[Domain, Scan]] = []
    for domain in domains:
        layers = tuple(
            layer if layer.kind in SHARDS else replace(layer, copies=domain.shard[1])
            for layer in found.layers
            if layer.weight in domain.names
        )
        if layers:
            pairs.append((domain, Scan(layers, () if pairs else found.skipped)))
    return pairs


def budgets(targets: Sequence[Target], config: KFACConfig) -> list[KFACConfig]:
    """The config of each domain here: they share a rank's memory budget as their layers need it."""
    budget = config.assignment.memory_budget_gb
    if budget is None or len(targets) == 1:
        return [config] * len(targets)
    method = config.preconditioner.method
    needs = [
        sum(packed_bytes(side) + kept_bytes(side, method) for layer in target.layers for side in (layer.A, layer.G))
        / target.layout.world
        for target in targets
    ]
    shares = [config.assignment.model_copy(update={"memory_budget_gb": budget * n / sum(needs)}) for n in needs]
    return [config.model_copy(update={"assignment": share}) for share in shares]


def check_copies(targets: Sequence[Target], plans: Sequence[Plan]) -> None:
    """What tensor-parallel ranks have copies of must be treated alike by all of them. Collective under tensor
    parallelism.

    Raises:
        ValueError: on every rank: their plans differ in what changes results.
    """
    target, plan = targets[0], plans[0]
    if target.domain.shard[1] == 1:
        return
    copied = {layer.name for layer in plan.layers if layer.copies > 1}
    offsets = {key: offset for key, offset in plan.offsets.items() if key[:-2] in copied}
    mine = (offsets, bool(plan.offsets), str(plan.wire), [str(dtype) for dtype in plan.gradient_dtypes])
    everyone = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    if any(other != mine for other in everyone):
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards are so different in size that their plans for the layers they "
            'have copies of differ; set "stagger": false in kfac.eigenbasis, and dtype and gradient_dtype in '
            "kfac.communication"
        )
