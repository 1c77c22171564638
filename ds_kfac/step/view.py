"""The parts of an engine that a preconditioner uses."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_kfac.directions.base import UpdateRule
from ds_kfac.model.layers import LayerSpec
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.registry import Domain
from ds_kfac.zero.seam import Seam


@dataclass(frozen=True)
class EngineView:
    """The part of an engine that one preconditioner handles, such as the engine's dense layers.

    Attributes:
        model: the engine's module.
        layers: the layers that are preconditioned.
        layout: where the engine keeps the gradients of the layers' parameters.
        other_params: trained parameters of the domain that belong to none of the layers.
        inner: the innermost optimizer, which DeepSpeed wraps.
        rule: the update rule of the layers.
        domain: the part of the job that is preconditioned, such as the experts of one
            expert-parallel group.
        seam: object that calls K-FAC when the engine steps.
    """

    model: nn.Module
    layers: tuple[LayerSpec, ...]
    layout: ShardLayout
    other_params: tuple[nn.Parameter, ...]
    inner: Any
    rule: UpdateRule
    domain: Domain
    seam: Seam
