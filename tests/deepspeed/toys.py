"""An update rule that nobody needs: a new one costs its own file and a line of ``DIRECTIONS``.

docs/development/update_rule.md shows this code, so its lines have 76 columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.eigen import LayerBasis
from ds_kfac.directions.base import Direction, UpdateRule
from ds_kfac.update.rotation import change_basis_, mask_null_space
from ds_kfac.update.state import Moments


class ToySGD(torch.optim.SGD):
    """What the toy rule follows."""


@dataclass(frozen=True)
class Mean(Moments):
    """The running mean of rotated gradients."""

    NAME: ClassVar = "mean"
    ROTATES: ClassVar = True

    first_OI: Tensor

    def change_basis_(
        self,
        old: LayerBasis | None,
        new: LayerBasis,
    ) -> None:
        change_basis_(self.first_OI, old, new)

    def unrotated(self, basis: LayerBasis) -> "Mean":
        return Mean(basis.restore(self.first_OI).contiguous())


class SoftSign(Direction):
    """m <- (m + R) / 2; then Q_G [m / (|m| + 0.01)] Q_A^T, which is 0 in
    null spaces, at the length of the gradient."""

    def layer(
        self,
        context,
        layer,
        gradient,
        basis,
        moments,
    ) -> tuple[Tensor, Mean]:
        mean = (moments.first_OI + basis.rotate(gradient)) / 2
        signs = mean / (mean.abs() + 0.01)
        result = basis.restore(mask_null_space(signs, basis))
        length = gradient.norm() / result.norm().clamp(min=1e-30)
        return result * length, Mean(mean)


class ToyRule(UpdateRule):
    optimizer_type = "ToySGD"

    def claims(self, optimizer: Any) -> bool:
        return isinstance(optimizer, ToySGD)

    def direction(self, plan, exchange, optimizer, metrics) -> SoftSign:
        return SoftSign(plan, exchange, Mean)

    def moments(self, config: KFACConfig) -> type[Mean]:
        return Mean

    # so that a DeepSpeed config can name the optimizer: {"optimizer": {"type": "ToySGD", "params":
    # {"lr": 0.1}}}

    def optimizer_params(
        self,
        ds_config: Mapping[str, Any],
    ) -> Mapping[str, Any] | None:
        block = ds_config.get("optimizer") or {}
        if block.get("type") != "ToySGD":
            return None
        return block.get("params") or {}

    def given(self, optimizer: Any) -> bool:
        return isinstance(optimizer, ToySGD)

    def install(
        self,
        arguments: dict[str, Any],
        config: KFACConfig,
        ds_config: Mapping[str, Any],
    ) -> None:
        params = self.optimizer_params(ds_config)
        if params is not None:  # else the optimizer is an argument already
            arguments["optimizer"] = lambda given: ToySGD(given, **params)
