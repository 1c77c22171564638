"""KFACAdamW: Adam in the eigenbasis, its direction orthogonalized; with an optimizer of its own for DeepSpeed."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.base import Direction, UpdateRule, stepped_by_rows
from ds_kfac.directions.kfac_adamw.direction import AdamDirection
from ds_kfac.directions.kfac_adamw.group_step import adam_factor, keeps_direction
from ds_kfac.directions.kfac_adamw.optimizer import FLAG, MATRIX, NAME, KFACAdamWStep, no_state, ratio_of
from ds_kfac.directions.kfac_adamw.user_optimizer import given_groups, params_in, put_into, unstepped
from ds_kfac.directions.step_tensors import kept_bytes
from ds_kfac.metrics import Metrics
from ds_kfac.model.blocks import KINDS, blocks_text, named, weight_name
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import chunks
from ds_kfac.update.newton_schulz import flops, workspace
from ds_kfac.update.rotation import AT_ONCE, chunk_budget
from ds_kfac.update.state import AdamMoments
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout


class KFACAdamWRule(UpdateRule):
    optimizer_type = NAME
    blocks = ("adam",)
    fisher = "activations_only"
    numbers = 3
    marks = (FLAG, MATRIX)
    without_curvature = "a layer is stepped without curvature"
    passes = 19  # three norms, scaling before and after, to and from 16 bits, what marks a layer in use, its moments

    kept, optimizer_params = staticmethod(kept_bytes), staticmethod(params_in)
    unstepped = staticmethod(unstepped)

    def claims(self, optimizer: Any) -> bool:
        return isinstance(optimizer, KFACAdamWStep)

    def given(self, optimizer: Any) -> bool:
        return given_groups(optimizer) is not None

    def direction(
        self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        layout.guard_states(no_state)
        return AdamDirection(plan, layout, exchange, optimizer)

    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        options = plan.config.adam
        kept = [adam_factor(options, x, ratio) for x in plan.layers if keeps_direction(options, x) is not None]
        low, high = (f"{each:.3g}" for each in (min(kept, default=0.0), max(kept, default=0.0)))
        at = "" if not kept else f" at {low} lr" if low == high else f" at {low} to {high} lr"
        where = "the eigenbasis" if plan.config.adam.rotate else "the layers' own coordinates"
        plain = sum(layer.A.block == layer.G.block == 0 for layer in plan.layers) if options.rotate else 0
        without = f"; {plain} have no factors: neither rotated nor whitened" if plain else ""
        return (
            f"Adam in {where} (KFACAdamW), {len(plan.layers) - len(kept)} layers orthogonalized at lr, {len(kept)} "
            f"along Adam's direction{at}{without}"
        )

    def ratio(self, ds_config: Mapping[str, Any]) -> float:
        return ratio_of(self.optimizer_params(ds_config) or {})

    def rates(self, plan: Plan, ratio: float) -> dict[str, float]:
        heads = [x for x in plan.layers if keeps_direction(plan.config.adam, x) is not None]
        largest = max((adam_factor(plan.config.adam, layer, ratio) for layer in heads), default=None)
        return {"matrices": 1.0, **({} if largest is None else {"heads": largest}), "others": ratio}

    def moments(self, config: KFACConfig) -> type[AdamMoments]:
        return AdamMoments

    def check(self, config: KFACConfig) -> None:
        if not config.adam.rotate and config.factor.fisher is not None:
            raise ValueError(
                f'kfac.adam.rotate false keeps no factors; kfac.factor.fisher "{config.factor.fisher}" has no use'
            )

    def scanned(self, config: KFACConfig) -> LayerChoice:
        return replace(config.choice, curvature=config.adam.rotate)

    def choice(self, config: KFACConfig, layer: LayerSpec) -> str | None:
        reason = keeps_direction(config.adam, layer)
        if reason is not None:
            return f"Adam's direction: {reason}"
        whitens = config.adam.whiten and config.adam.rotate and layer.A.block > 0  # not by the identity
        how = "whitened and orthogonalized" if whitens else "orthogonalized"
        blocks = f" in blocks of {blocks_text(layer)}" if layer.blocks else ""
        return f"{how}{blocks}, {layer.guessed}" if layer.guessed else how + blocks

    def idle(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> list[str]:
        given = config.adam.model_fields_set
        fused = {weight_name(layer): layer for layer in layers if layer.kind in KINDS}
        patterns = {
            "except_layers": (config.adam.except_layers, [layer.module for layer in layers]),
            "blocks": (config.adam.blocks, list(fused)),
        }
        missed = [
            f"kfac.adam.{key} {pattern!r}, which no layer's name ends with"
            for key, (values, names) in patterns.items()
            for pattern in (values if key in given else ())
            if not any(named(pattern, name) for name in names)
        ]
        for pattern in config.adam.blocks:
            kept = [keeps_direction(config.adam, layer) for name, layer in fused.items() if named(pattern, name)]
            if kept and all(kept):
                missed.append(f"kfac.adam.blocks {pattern!r}, whose layers keep Adam's direction ({kept[0]})")
        return missed

    def others(self, optimizer: str, ratio: float, matrices: int) -> str:
        left = f", {matrices:,} of them in matrices, at lr as their biases" if matrices else ""
        return f"AdamW at {ratio:.3g} lr (adam_lr){left}"

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        return self.flops(config, layer) == 0

    def flops(self, config: KFACConfig, layer: LayerSpec, *, half: bool = False) -> int:
        if keeps_direction(config.adam, layer) is not None:
            return 0
        return sum(flops(*sides, half=half) for sides in layer.maps)

    def workspace(self, plan: Plan, groups: Sequence[Sequence[LayerSpec]]) -> list[tuple[Sequence[LayerSpec], int]]:
        taken = chunks(groups, batched=plan.batched)
        return [([layer for group in chunk for layer in group], self._workspace(plan, chunk)) for chunk in taken]

    def _workspace(self, plan: Plan, chunk: Sequence[Sequence[LayerSpec]]) -> int:
        """Bytes of a chunk's directions, and of the larger one of two stages: Adam's, of one group at a time (the
        gradient, once more if it is pending in another dtype; half and wholly rotated), and Newton-Schulz's, of maps
        with the same sides."""
        adam, iterated, copied, whole, same_sides = 0, 0, 0, 0, Counter[Hashable]()
        copies, width = 3 + (plan.pending_dtype is not torch.float32), 2 if plan.precision.products == "tf32" else 4
        for group in chunk:
            numel = sum(layer.numel for layer in group)
            whole += numel
            adam = max(adam, 4 * copies * (AT_ONCE if stepped_by_rows(group) else numel))
            if keeps_direction(plan.config.adam, group[0]) is None:
                blocks = group[0].blocks
                if blocks and sum(blocks) < group[0].shape[-2]:  # whose rows lie apart: copies
                    copied += 4 * numel
                for sides, count in Counter(sides for layer in group for sides in layer.maps).items():
                    nbytes = width * count * workspace(*sides)
                    same_sides[tuple(sorted(sides)) if plan.batched else (group[0].name, sides)] += nbytes
                    iterated = max(iterated, nbytes)
        # maps that are iterated together (same_sides), with about 3 elements of workspace() for one of theirs
        limit = 3 * width * chunk_budget(batched=plan.batched, numel=chunk[0][0].numel)
        largest = max(iterated, *(min(nbytes, limit) for nbytes in (0, *same_sides.values())))
        return 4 * whole + max(adam, largest + copied)

    def install(self, arguments: dict[str, Any], config: KFACConfig, ds_config: Mapping[str, Any]) -> None:
        if not config.enabled:
            raise ValueError(
                f'the optimizer {NAME} needs K-FAC, but "kfac" says "enabled": false; use "AdamW" to train without it'
            )
        config, _ = self.resolved(config)
        put_into(arguments, self.scanned(config), self.optimizer_params(ds_config), ds_config)

    def check_groups(
        self, model: nn.Module, layers: Sequence[LayerSpec], layout: ShardLayout, other_params: ShardLayout
    ) -> None:
        groups, named = layout.optimizer.param_groups, dict(model.named_parameters())
        for held, ours in ((layout, True), (other_params, False)):
            for parameter in held.params:
                if bool(groups[held.group_index(parameter)].get(FLAG)) != ours:
                    name = next(name for name, p in named.items() if p is parameter)
                    raise ValueError(
                        f"KFACAdamW: {name} is {'' if ours else 'not '}preconditioned, but its parameter group says "
                        "otherwise; the model or kfac.layers changed between ds_kfac.initialize and attach"
                    )
        for layer in layers:
            of_weight, *others = [groups[layout.group_index(named[name])] for name in layer.parameters]
            for key in ("betas", "eps"):
                for other in (group for group in others if group[key] != of_weight[key]):
                    raise ValueError(
                        f"KFACAdamW: {layer.weight} and its bias are in parameter groups of different {key}, "
                        f"{of_weight[key]} and {other[key]}: they are stepped as one matrix, with one pair of moments; "
                        "give both groups the same betas and eps, or exclude the layer (kfac.layers.exclude)"
                    )

    def release(self, optimizer: Any) -> None:
        optimizer.slices = None
