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
from ds_kfac.scan import Scan
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
    if (pipeline or sharded) and adam and engine.gradient_clipping():
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
        if adam:
            refused.append(
                "KFACAdamW with a mixture of experts: its directions are scaled within one process group; use another "
                "optimizer"
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


def agreeing(engine: Any) -> AbstractContextManager:
    """Around work that may fail on some stages or shards only: fails on all ranks then."""
    if not isinstance(engine, PipelineEngine) and tensor_shard(engine)[1] == 1:
        return nullcontext()
    headline = "ds_kfac cannot attach to this model-parallel engine"
    return failing_together(headline, torch.distributed.group.WORLD, ValueError)


def by_domain(found: Scan, domains: Sequence[Domain], engine: Any) -> list[Scan]:
    """The layers of each domain, and how many tensor-parallel ranks hold each; what was skipped, in the first."""
    _, shards = tensor_shard(engine)
    named = dict(engine.module.named_parameters())
    scans = []
    for index, domain in enumerate(domains):
        own = {id(p) for p in domain.params}
        layers = (layer for layer in found.layers if id(named[layer.weight]) in own)
        counted = tuple(layer if layer.kind in SHARDS else replace(layer, copies=shards) for layer in layers)
        scans.append(Scan(counted, found.skipped if index == 0 else ()))
    return scans
