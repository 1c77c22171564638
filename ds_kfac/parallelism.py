"""What model parallelism rules out: combinations with the rest of the config that would be wrong are refused."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from ds_kfac.adamw import KFACAdamWStep
from ds_kfac.agreement import failing_together
from ds_kfac.config import KFACConfig


def check(engine: Any, config: KFACConfig) -> None:
    """Raise ValueError naming every key that does not go with the engine's parallelism."""
    refused = []
    pipeline, adam = isinstance(engine, PipelineEngine), isinstance(engine.basic_optimizer, KFACAdamWStep)
    if pipeline and config.factor.fisher == "monte_carlo":
        refused.append(
            'kfac.factor.fisher "monte_carlo" with a pipeline: the sampled loss needs a second backward through all '
            'stages; use "empirical"'
        )
    if pipeline and adam and engine.gradient_clipping():
        refused.append(
            "KFACAdamW with gradient_clipping and a pipeline: its moments are those of clipped gradients, and the norm "
            'over stages is not known to a rank before the step; set "gradient_clipping": 0'
        )
    counts = _group_counts(engine) if pipeline and adam and engine.zero_optimization() else []
    if len(set(counts)) > 1:
        refused.append(
            f"KFACAdamW with these pipeline stages: they have {counts} parameter groups, and ZeRO-1 takes "
            "a norm over all stages for each, for which it would wait for ever; give every stage preconditioned "
            "parameters and others, or none of the one kind (kfac.layers.types)"
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
    """Around work that may fail on some stages of a pipeline only: fails on all ranks then."""
    if not isinstance(engine, PipelineEngine):
        return nullcontext()
    return failing_together("ds_kfac cannot attach to this pipeline", torch.distributed.group.WORLD, ValueError)
