"""What model parallelism rules out: combinations with the rest of the config that would be wrong are refused."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ds_kfac.assignment.work import kept_bytes, packed_bytes
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.model.layers.registry import CUT_SIDES, SHARDS
from ds_kfac.model.scan import Scan
from ds_kfac.plan.plan import Plan
from ds_kfac.step.target import Target
from ds_kfac.zero.domains import Domain


def agreeing(several: bool) -> AbstractContextManager:
    """Around work that may fail in some domains only: if there are several, it fails on all ranks then. Collective."""
    if not several:
        return nullcontext()
    headline = "ds_kfac cannot attach to this model-parallel engine"
    return failing_together(headline, torch.distributed.group.WORLD, ValueError)


def by_domain(found: Scan, domains: Sequence[Domain]) -> list[tuple[Domain, Scan]]:
    """The layers of each domain that has some; what was skipped, in the first of them."""
    pairs: list[tuple[Domain, Scan]] = []
    for domain in domains:
        layers = tuple(_in_shards(layer, domain.shard[1]) for layer in found.layers if layer.weight in domain.names)
        if layers:
            pairs.append((domain, Scan(layers, () if pairs else found.skipped)))
    return pairs


def _in_shards(layer: LayerSpec, shards: int) -> LayerSpec:
    """A layer that each of so many tensor-parallel ranks has its part of, or a copy."""
    if layer.kind not in SHARDS:
        return replace(layer, copies=shards)
    return replace(layer, cut=(shards, 1) if CUT_SIDES[layer.kind] == 0 else (1, shards))


def budgets(targets: Sequence[Target], config: KFACConfig) -> list[KFACConfig]:
    """The config of each domain here: they share a rank's memory budget as their layers need it."""
    budget = config.assignment.memory_budget_gb
    if budget is None or len(targets) == 1:
        return [config] * len(targets)
    method = config.preconditioner.method
    needs = [
        sum(packed_bytes(side) + kept_bytes(side, method) for layer in target.layers for side in (layer.A, layer.G))
        / target.layout.world
        for target in targets
    ]
    return [config.having("assignment", memory_budget_gb=budget * need / sum(needs)) for need in needs]


def check_copies(targets: Sequence[Target], plans: Sequence[Plan]) -> None:
    """What tensor-parallel ranks have copies of must be treated alike by all of them. Collective under tensor
    parallelism.

    Raises:
        ValueError: on every rank: their plans differ in what changes results.
    """
    target, plan = targets[0], plans[0]
    if target.domain.shard[1] == 1:
        return
    copied = {layer.name for layer in plan.layers if layer.copies > 1}
    offsets = {key: offset for key, offset in plan.offsets.items() if key[:-2] in copied}
    mine = (offsets, bool(plan.offsets), str(plan.wire), [str(dtype) for dtype in plan.gradient_dtypes])
    if any(other != mine for other in gathered(mine)):
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards are so different in size that their plans for the layers they "
            'have copies of differ; set "stagger": false in kfac.eigenbasis, and dtype and gradient_dtype in '
            "kfac.communication"
        )
