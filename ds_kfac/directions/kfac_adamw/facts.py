"""What the report, the logs and the estimate want to know about KFACAdamW."""

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
    without_curvature = "a layer is stepped without curvature"
    # Of a recorded step in fp32, as tests/step/test_operations.py counts them. Three norms: 3. Adam
    # reads the rotated gradient and writes a direction: 2; it reads and writes both moments: 4. The
    # direction is scaled before its iteration, after it, and to its size: 6. The gradient is copied
    # to its fixed place, and the result from there: 4.
    passes = 19

    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        options = plan.config.adam
        factors = _adam_factors(options, plan.layers, ratio)
        at = ""
        if factors:
            low, high = f"{min(factors):.3g}", f"{max(factors):.3g}"
            at = f" at {low} lr" if low == high else f" at {low} to {high} lr"
        where = "the eigenbasis" if options.rotate else "the layers' own coordinates"
        plain = (
            sum(layer.A.block == layer.G.block == 0 for layer in plan.layers)
            if options.rotate
            else 0
        )
        without = f"; {plain} have no factors: neither rotated nor whitened" if plain else ""
        return (
            f"Adam in {where} (KFACAdamW), {len(plan.layers) - len(factors)} layers "
            f"orthogonalized at lr, "
            f"{len(factors)} along Adam's direction{at}{without}"
        )

    def others(self, optimizer: str, ratio: float, matrices: int) -> str:
        left = f", {matrices:,} of them in matrices, at lr as their biases" if matrices else ""
        return f"AdamW at {ratio:.3g} lr (adam_lr){left}"

    def choice(self, config: KFACConfig, layer: LayerSpec) -> str | None:
        reason = keeps_direction(config.adam, layer)
        if reason is not None:
            return f"Adam's direction: {reason}"
        # not by the identity
        whitens = config.adam.whiten and config.adam.rotate and layer.A.block > 0
        how = "whitened and orthogonalized" if whitens else "orthogonalized"
        blocks = f" in blocks of {blocks_text(layer)}" if layer.blocks else ""
        guessed = f", {layer.guessed}" if layer.guessed else ""
        return f"{how}{blocks}{guessed}"

    def idle(self, config: KFACConfig, layers: Sequence[LayerSpec]) -> list[str]:
        options = config.adam
        fused = {weight_name(layer): layer for layer in layers if layer.kind in KINDS}
        names = {"except_layers": [layer.module for layer in layers], "blocks": list(fused)}
        missed = []
        for key in names:
            patterns = getattr(options, key) if key in options.model_fields_set else ()
            for pattern in patterns:
                if not any(named(pattern, name) for name in names[key]):
                    missed.append(f"kfac.adam.{key} {pattern!r}, which no layer's name ends with")
        for pattern in options.blocks:
            reasons = [
                keeps_direction(options, layer)
                for name, layer in fused.items()
                if named(pattern, name)
            ]
            if reasons and all(reasons):
                missed.append(
                    f"kfac.adam.blocks {pattern!r}, whose layers keep Adam's direction "
                    f"({reasons[0]})"
                )
        return missed

    def ratio(self, ds_config: Mapping[str, Any]) -> float:
        return ratio_of(params_in(ds_config) or {})

    def rates(self, plan: Plan, ratio: float) -> dict[str, float]:
        rates = {"matrices": 1.0}
        if factors := _adam_factors(plan.config.adam, plan.layers, ratio):
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
        taken = chunks(groups, batched=plan.batched)
        return [
            ([layer for group in chunk for layer in group], _workspace(plan, chunk))
            for chunk in taken
        ]


def _adam_factors(options: AdamConfig, layers: Sequence[LayerSpec], ratio: float) -> list[float]:
    """Learning rates of the layers that keep Adam's direction, as multiples of ``lr``."""
    return [
        adam_factor(options, layer, ratio)
        for layer in layers
        if keeps_direction(options, layer) is not None
    ]


def _workspace(plan: Plan, chunk: Sequence[Sequence[LayerSpec]]) -> int:
    """Bytes of a chunk's directions and of the larger one of two stages.

    - Adam's stage works on one group at a time. Beside what becomes its direction it holds two
      tensors of its size: the gradient, and that half rotated.
    - The Newton-Schulz stage works on all maps with the same sides together.
    """
    width = 2 if plan.precision.products == "tf32" else 4
    copies = 2
    directions = 0
    adam = 0
    iterated = 0
    copied = 0
    same_sides = Counter[Hashable]()
    for group in chunk:
        numel = sum(layer.numel for layer in group)
        directions += 4 * numel
        adam = max(adam, 4 * (AT_ONCE if stepped_by_rows(group) else copies * numel))
        if keeps_direction(plan.config.adam, group[0]) is not None:
            continue
        blocks = group[0].blocks
        # the rows of a block lie apart, so they are copied
        if blocks and sum(blocks) < group[0].shape[-2]:
            copied += 4 * numel
        for sides, count in Counter(sides for layer in group for sides in layer.maps).items():
            nbytes = width * count * newton_schulz.workspace(*sides)
            same_sides[tuple(sorted(sides)) if plan.batched else (group[0].name, sides)] += nbytes
            iterated = max(iterated, nbytes)
    # maps that are iterated together (same_sides), with about 3 elements of workspace() for one of
    # theirs
    limit = 3 * width * chunk_budget(batched=plan.batched, numel=chunk[0][0].numel)
    largest = max(iterated, *(min(nbytes, limit) for nbytes in (0, *same_sides.values())))
    return directions + max(adam, largest + copied)
