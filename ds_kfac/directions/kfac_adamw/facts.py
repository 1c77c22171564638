"""Descriptions and costs of KFACAdamW, for the report, the logs and the estimate."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ds_kfac.config.keys import AdamConfig, KFACConfig
from ds_kfac.directions.facts import RuleFacts, stepped_by_rows
from ds_kfac.directions.kfac_adamw.group_step import adam_factor, keeps_direction
from ds_kfac.directions.kfac_adamw.optimizer import ratio_of
from ds_kfac.directions.kfac_adamw.user_optimizer import params_in
from ds_kfac.directions.step_tensors import kept_bytes
from ds_kfac.model.blocks import KINDS, blocks_text, named, weight_name
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update import newton_schulz
from ds_kfac.update.groups import chunks
from ds_kfac.update.rotation import AT_ONCE, chunk_budget


class KFACAdamWFacts(RuleFacts):
    without_curvature = "a layer is updated without curvature"
    # The passes of a recorded step in fp32, as tests/step/test_operations.py counts them:
    #   3  three norms
    #   2  Adam reads the rotated gradient and writes a direction
    #   1  the second moment is averaged over rows, to find null directions
    #   4  Adam reads and writes both moments
    #   6  the direction is scaled before the iteration, after the iteration, and to its final size
    #   4  the gradient is copied to its fixed place, and the result is copied from there
    passes = 20

    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        options = plan.config.adam
        factors = _adam_factors(options, plan.layers, ratio)
        at = ""
        if factors:
            low = f"{min(factors):.3g}"
            high = f"{max(factors):.3g}"
            at = f" at {low} lr" if low == high else f" at {low} to {high} lr"
        where = "the eigenbasis" if options.rotate else "the layers' own coordinates"
        without_factors = sum(layer.A.block == layer.G.block == 0 for layer in plan.layers)
        without = ""
        if without_factors and options.rotate:
            without = f"; {without_factors} have no factors: neither rotated nor whitened"
        return (
            f"Adam in {where} (KFACAdamW), {len(plan.layers) - len(factors)} layers orthogonalized "
            f"at lr, {len(factors)} along Adam's direction{at}{without}"
        )

    def others(self, optimizer: str, ratio: float, matrices: str) -> str:
        text = f"AdamW at {ratio:.3g} lr (adam_lr)"
        if matrices:
            text += f", but at lr in these matrices and their biases: {matrices}"
        return text

    def choice(self, config: KFACConfig, layer: LayerSpec) -> str | None:
        reason = keeps_direction(config.adam, layer)
        if reason is not None:
            return f"Adam's direction: {reason}"
        # whitening by an A that is the identity does nothing
        is_whitened = config.adam.whiten and config.adam.rotate and layer.A.block > 0
        how = "whitened and orthogonalized" if is_whitened else "orthogonalized"
        blocks = f" in blocks of {blocks_text(layer)}" if layer.blocks else ""
        guessed = f", {layer.guessed}" if layer.guessed else ""
        return f"{how}{blocks}{guessed}"

    def idle(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> list[str]:
        options = config.adam
        fused = {weight_name(layer): layer for layer in layers if layer.kind in KINDS}
        names = {"except_layers": [layer.module for layer in layers], "blocks": list(fused)}
        without_effect = []
        for key in names:
            patterns = getattr(options, key) if key in options.model_fields_set else ()
            for pattern in patterns:
                if not any(named(pattern, name) for name in names[key]):
                    without_effect.append(
                        f"kfac.adam.{key} {pattern!r}: no layer's name ends with it"
                    )
        for pattern in options.blocks:
            matching = [layer for name, layer in fused.items() if named(pattern, name)]
            reasons = [keeps_direction(options, layer) for layer in matching]
            if reasons and all(reasons):
                without_effect.append(
                    f"kfac.adam.blocks {pattern!r}, whose layers keep Adam's direction "
                    f"({reasons[0]})"
                )
        return without_effect

    def ratio(self, ds_config: Mapping[str, Any]) -> float:
        return ratio_of(params_in(ds_config) or {})

    def rates(self, plan: Plan, ratio: float) -> dict[str, float]:
        rates = {"matrices": 1.0}
        factors = _adam_factors(plan.config.adam, plan.layers, ratio)
        if factors:
            rates["heads"] = max(factors)
        rates["others"] = ratio
        return rates

    def flops(self, config: KFACConfig, layer: LayerSpec, *, half: bool = False) -> int:
        if keeps_direction(config.adam, layer) is not None:
            return 0
        return sum(newton_schulz.flops(*sides, half=half) for sides in layer.maps)

    def kept(self, plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
        return kept_bytes(plan, layers, device)

    def workspace(
        self, plan: Plan, groups: Sequence[Sequence[LayerSpec]]
    ) -> list[tuple[Sequence[LayerSpec], int]]:
        return [
            ([layer for group in chunk for layer in group], _workspace(plan, chunk))
            for chunk in chunks(groups, batched=plan.batched)
        ]


def _adam_factors(options: AdamConfig, layers: Sequence[LayerSpec], ratio: float) -> list[float]:
    """Return the learning rates of the layers that keep Adam's direction, as multiples of
    ``lr``."""
    return [
        adam_factor(options, layer, ratio)
        for layer in layers
        if keeps_direction(options, layer) is not None
    ]


def _workspace(plan: Plan, chunk: Sequence[Sequence[LayerSpec]]) -> int:
    """Return the bytes of a chunk's directions, plus the temporary bytes of the larger of two
    stages:

    - Adam's stage works on one group at a time. In addition to the tensor that becomes the group's
      direction, it needs two tensors of the same size: the gradient, and the gradient with one side
      rotated.
    - The Newton-Schulz stage works on all maps with the same two sides together.
    """
    itemsize = 2 if plan.precision.products == "tf32" else 4
    directions = 0
    adam_stage = 0
    largest_group = 0
    copied_blocks = 0
    bytes_by_sides = Counter[Hashable]()
    for group in chunk:
        numel = sum(layer.numel for layer in group)
        directions += 4 * numel
        adam_stage = max(adam_stage, 4 * (AT_ONCE if stepped_by_rows(group) else 2 * numel))
        if keeps_direction(plan.config.adam, group[0]) is not None:
            continue
        blocks = group[0].blocks
        # the rows of a block are not contiguous, so they are copied
        if blocks and sum(blocks) < group[0].shape[-2]:
            copied_blocks += 4 * numel
        for sides, count in Counter(sides for layer in group for sides in layer.maps).items():
            nbytes = itemsize * count * newton_schulz.workspace(*sides)
            iterated_with = tuple(sorted(sides)) if plan.batched else (group[0].name, sides)
            bytes_by_sides[iterated_with] += nbytes
            largest_group = max(largest_group, nbytes)
    # Maps of several groups go through the iteration in one batch if the batch has at most
    # chunk_budget() elements. For each element of a map, workspace() counts about 3 elements.
    limit = 3 * itemsize * chunk_budget(batched=plan.batched, numel=chunk[0][0].numel)
    several_groups = max((min(nbytes, limit) for nbytes in bytes_by_sides.values()), default=0)
    newton_schulz_stage = max(largest_group, several_groups) + copied_blocks
    return directions + max(adam_stage, newton_schulz_stage)
