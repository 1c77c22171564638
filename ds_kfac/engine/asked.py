"""What refusals are asked of: an engine, or a DeepSpeed config alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from ds_kfac.config.kfac import KFACConfig
from ds_kfac.zero.domains import tensor_shard


@dataclass(frozen=True)
class Engine:
    """What is asked.

    Attributes:
        engine: DeepSpeed's.
        config: with where G comes from.
        own: whether the update rule has an optimizer of its own, and its name.
    """

    engine: Any
    config: KFACConfig
    own: str | None

    @property
    def inner(self) -> str:
        return type(getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)).__name__

    @property
    def offload(self) -> Any:
        return getattr(self.engine._config.zero_config, "offload_optimizer", None)

    @property
    def pipeline(self) -> bool:
        return isinstance(self.engine, PipelineEngine)

    @property
    def sharded(self) -> bool:
        return tensor_shard(self.engine)[1] > 1

    @property
    def sequence(self) -> bool:
        return groups._get_sequence_parallel_world_size() > 1

    @property
    def experts(self) -> bool:
        return self.engine.has_moe_layers

    @property
    def stage_3(self) -> bool:
        return self.engine.zero_optimization_partition_weights()

    @property
    def sampled(self) -> bool:
        return self.config.factor.fisher == "monte_carlo"

    @property
    def quadratic(self) -> bool:
        return self.config.preconditioner.step == "quadratic"

    @property
    def rescaled(self) -> bool:
        return self.config.rescale_weights

    @property
    def reduced(self) -> bool:
        return self.config.factor.weight_sharing == "reduce"


def block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside a DeepSpeed config; empty if there is none."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class Configured:
    """An engine of which there is only the DeepSpeed config; ``stage`` of ZeRO may be another one than it says."""

    ds_config: Mapping[str, Any]
    config: KFACConfig
    stage: Any

    @property
    def optimizer(self) -> str:
        return str(block(self.ds_config, "optimizer").get("type") or "").lower()

    @property
    def zero(self) -> Mapping[str, Any]:
        return block(self.ds_config, "zero_optimization")

    @property
    def offload(self) -> Mapping[str, Any]:
        return block(self.zero, "offload_optimizer")


@dataclass(frozen=True)
class Refusal:
    """A line of :data:`REFUSALS`.

    Attributes:
        applies: to an engine. Asked on every rank, in the order of the table; may be collective.
        remedy: why, and what to change.
        configured: whether a DeepSpeed config alone says that it will apply; None: it cannot.
    """

    applies: Callable[[Engine], bool]
    remedy: str
    configured: Callable[[Configured], bool] | None = None
