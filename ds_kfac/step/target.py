"""What is preconditioned: the model's layers, and where the engine keeps their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_kfac.directions.base import UpdateRule
from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.layers import LayerSpec
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
        rule: how it steps.
        domain: what of the job this is.
        info_of: of a module's call, given the micro-batch's.
    """

    model: nn.Module
    layers: tuple[LayerSpec, ...]
    layout: ShardLayout
    rest: ShardLayout
    inner: Any
    rule: UpdateRule
    domain: Domain
    info_of: Callable[[str, BatchInfo], BatchInfo] | None = None

    @property
    def clips(self) -> bool:
        """Whether the engine clips by a norm that is known before its step: not if there are other domains."""
        return bool(self.layout.engine.gradient_clipping()) and not self.domain.name
