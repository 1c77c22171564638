"""The update rule KFACAdamW: Adam in the eigenbasis, with an orthogonalized direction. The rule has
its own optimizer, whose ``step`` DeepSpeed calls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.base import DISABLED, UpdateRule
from ds_kfac.directions.direction import Direction
from ds_kfac.directions.kfac_adamw.direction import AdamDirection
from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.directions.kfac_adamw.group_step import keeps_direction
from ds_kfac.directions.kfac_adamw.optimizer import FLAG, MATRIX, NAME, KFACAdamWStep, no_state
from ds_kfac.directions.kfac_adamw.user_optimizer import (
    given_groups,
    params_in,
    put_into,
    unstepped,
)
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice
from ds_kfac.plan.plan import Plan
from ds_kfac.update.state import AdamMoments
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout


class KFACAdamWRule(UpdateRule):
    facts = KFACAdamWFacts()
    optimizer_type = NAME
    blocks = ("adam",)
    fisher = "activations_only"
    numbers = 1
    marks = (FLAG, MATRIX)

    optimizer_params = staticmethod(params_in)
    unstepped = staticmethod(unstepped)

    def claims(self, optimizer: Any) -> bool:
        return isinstance(optimizer, KFACAdamWStep)

    def given(self, optimizer: Any) -> bool:
        return given_groups(optimizer) is not None

    def direction(
        self, plan: Plan, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        exchange.layout.guard_states(no_state)
        return AdamDirection(plan, exchange, optimizer)

    def flags(self, config: KFACConfig) -> bool:
        return True

    def moments(self, config: KFACConfig) -> type[AdamMoments]:
        return AdamMoments

    def check(self, config: KFACConfig) -> None:
        if not config.adam.rotate and config.factor.fisher is not None:
            raise ValueError(
                "with kfac.adam.rotate false there are no factors, so kfac.factor.fisher "
                f'"{config.factor.fisher}" would have no effect; remove this key'
            )

    def scanned(self, config: KFACConfig) -> LayerChoice:
        return replace(config.choice, curvature=config.adam.rotate)

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        # Newton-Schulz mixes outputs, so it must see the layer undivided
        return keeps_direction(config.adam, layer) is not None

    def install(
        self, arguments: dict[str, Any], config: KFACConfig, ds_config: Mapping[str, Any]
    ) -> None:
        if not config.enabled:
            raise ValueError(DISABLED.format(optimizer=NAME))
        config, _ = self.resolved(config)
        put_into(arguments, self.scanned(config), self.optimizer_params(ds_config), ds_config)

    def check_groups(
        self,
        model: nn.Module,
        layers: Sequence[LayerSpec],
        layout: ShardLayout,
        other_params: Sequence[nn.Parameter],
    ) -> None:
        groups = layout.optimizer.param_groups
        named = dict(model.named_parameters())
        for parameters, preconditioned in ((layout.params, True), (other_params, False)):
            for parameter in parameters:
                group = groups[layout.group_index(parameter)]
                if bool(group.get(FLAG)) == preconditioned:
                    continue
                name = next(name for name, p in named.items() if p is parameter)
                raise ValueError(
                    f"KFACAdamW: {name} is {'' if preconditioned else 'not '}preconditioned, but "
                    f"its parameter group is{' not' if preconditioned else ''}: the model or "
                    "kfac.layers has changed between ds_kfac.initialize and attach"
                )
        for layer in layers:
            weight_group, *other_groups = [
                groups[layout.group_index(named[name])] for name in layer.parameters
            ]
            for key in ("betas", "eps"):
                for group in other_groups:
                    if group[key] == weight_group[key]:
                        continue
                    raise ValueError(
                        f"KFACAdamW: {layer.weight} and its bias are in parameter groups of "
                        f"different {key}, {weight_group[key]} and {group[key]}, but weight and "
                        "bias are updated as one matrix, with one pair of moments; give both "
                        "groups the same betas and eps, or exclude the layer (kfac.layers.exclude)"
                    )

    def release(self, optimizer: Any) -> None:
        optimizer.slices = None
        optimizer.used = torch.zeros(0, device="cpu", dtype=torch.float32)
