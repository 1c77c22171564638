"""What is preconditioned: the model's layers, and where the engine keeps their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_kfac.adamw import KFACAdamWStep
from ds_kfac.batch_info import BatchInfo
from ds_kfac.config import KFACConfig
from ds_kfac.layers.base import LayerSpec
from ds_kfac.zero.domains import Domain
from ds_kfac.zero.layout import ShardLayout


@dataclass(frozen=True)
class Target:
    """What is preconditioned, and where its gradients are.

    Attributes:
        model: the engine's module.
        layers: what is preconditioned.
        layout: where the engine keeps the gradients of ``parameter_names(layers)``.
        rest: where it keeps all others.
        inner: the innermost optimizer, which DeepSpeed wraps.
        scheduled_lr: whether the learning rate follows a schedule.
        domain: what of the job this is.
        info_of: of a module's call, given the micro-batch's.
    """

    model: nn.Module
    layers: tuple[LayerSpec, ...]
    layout: ShardLayout
    rest: ShardLayout
    inner: Any
    scheduled_lr: bool
    domain: Domain
    info_of: Callable[[str, BatchInfo], BatchInfo] | None = None


def moments_of(config: KFACConfig, inner: Any) -> str | None:
    """Kind of moments that gradient workers keep."""
    if isinstance(inner, KFACAdamWStep):
        return "adam"
    return "corrected" if config.preconditioner.eigenvalues == "corrected" else None
