"""What model parallelism rules out: combinations with the rest of the config that would be wrong are refused."""

from typing import Any

from deepspeed.utils import groups

from ds_kfac.config import KFACConfig


def check(engine: Any, config: KFACConfig) -> None:
    """Raise ValueError naming every key that does not go with the engine's parallelism."""
    refused = []
    if groups._get_sequence_parallel_world_size() > 1 and config.factor.weight_sharing == "reduce":
        refused.append(
            'kfac.factor.weight_sharing "reduce" with sequence parallelism: a sequence\'s rows lie on several ranks, '
            'and their sum is needed; use "expand"'
        )
    if refused:
        raise ValueError("ds_kfac cannot attach to this engine:\n  " + "\n  ".join(refused))
