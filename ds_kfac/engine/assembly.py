"""From an engine to its :class:`Job`: domains, their layers, a plan for each, and what preconditions them."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from deepspeed.utils import logger

from ds_kfac.assignment.costs import BUILTIN, CostModel, measured
from ds_kfac.assignment.work import kept_bytes, packed_bytes
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.table import rule_of
from ds_kfac.model.batch import ExpertRows
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import CUT_SIDES, SHARDS
from ds_kfac.model.scan import Scan, scan
from ds_kfac.ops import dispatch
from ds_kfac.plan.make_plan import Setting, make_plan
from ds_kfac.plan.plan import Plan
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner, Target
from ds_kfac.zero.domains import Domain, domains
from ds_kfac.zero.registry import optimized_parameters, self_test, shard_layout
from ds_kfac.zero.shards import held_by_layer, parameter_names, pieces_of


def assemble(
    engine: Any, config: KFACConfig, answers: tuple[str, ...], experts: ExpertRows | None
) -> tuple[Job, tuple[Scan, ...]]:
    """Collective: call on every rank. Returns the job, tested, and what was found in each of its domains.

    Args:
        config, answers: with its nulls answered, and how.

    Raises:
        ValueError: nothing to precondition, or a plan that cannot be made; on every rank.
        RuntimeError: the self-test failed.
    """
    optimized = optimized_parameters(engine)
    parts = domains(engine, optimized)
    several = bool(parts[0].name)
    _choose_backend(engine, config)
    costs = agreed_costs(torch.device(engine.device), config.assignment.costs)
    with agreeing(several):  # one stage may have no layers, or too little memory
        rule = rule_of(engine.basic_optimizer)
        found = scan(engine.module, rule.scanned(config), optimized=optimized)
        found = replace(found, layers=rule.cut(config, found.layers))
        pairs = by_domain(found, parts)
        targets = [make_target(engine, domain, part, experts) for domain, part in pairs]
        plans = [
            make_plan(target.layers, setting(target, config), budget, costs, answers)
            for target, budget in zip(targets, budgets(targets, config), strict=True)
        ]
        for target in targets:
            target.rule.check_groups(target.model, target.layout, target.rest)
    check_copies(targets, plans)
    preconditioners = [KFACPreconditioner(target, plan) for target, plan in zip(targets, plans, strict=True)]
    job = Job(preconditioners, everywhere=several)
    try:
        with agreeing(several):
            for kfac in preconditioners:
                self_test(kfac.layout, kfac.exchange.plan.of_parameter, kfac.channel)
    except Exception:
        job.close()
        raise
    return job, tuple(part for _, part in pairs)


def _choose_backend(engine: Any, config: KFACConfig) -> None:
    """Build what is missing and check it. A backend that was asked for and cannot run on some rank is an error on all
    of them; one that was not, and an op that is wrong on some rank, is used nowhere then: replicas that round
    differently would drift apart."""
    name, device = config.ops.backend, torch.device(engine.device).type
    error = RuntimeError if name is None else ValueError
    with failing_together("ds_kfac cannot attach", torch.distributed.group.WORLD, error):
        choice = dispatch.use(name, device)
    everyone = enumerate(gathered(dict(choice.missing)))
    lacking = {what: f"rank {rank}: {why}" for rank, missing in everyone for what, why in missing.items()}
    if lacking.keys() - choice.missing:
        choice = dispatch.use(name, device, without={**lacking, **choice.missing})
    if choice.replaced and torch.distributed.get_rank() == 0:
        logger.warning(f"ds_kfac: plain torch runs instead, on all ranks: {'; '.join(choice.replaced.values())}")


def make_target(engine: Any, domain: Domain, found: Scan, experts: ExpertRows | None) -> Target:
    """A domain's layers and where the engine keeps their gradients."""
    named = dict(engine.module.named_parameters())
    ours = [named[name] for name in parameter_names(found.layers)]
    own_ids = {id(parameter) for parameter in ours}
    return Target(
        model=engine.module,
        layers=found.layers,
        layout=shard_layout(engine, ours, domain.group, pieces_of(found.layers)),
        rest=shard_layout(engine, [p for p in domain.params if id(p) not in own_ids], domain.group),
        inner=engine.basic_optimizer,
        rule=rule_of(engine.basic_optimizer),
        domain=domain,
        info_of=experts,
    )


def setting(target: Target, config: KFACConfig) -> Setting:
    """What a plan has to know of the engine."""
    layout = target.layout
    return Setting(
        world=layout.world,
        held=None if layout.replicated else held_by_layer(target.layers, layout.shards),
        parameters=layout.params[0].dtype,
        gradients=layout.dtype,
        moments=target.rule.moments_count(config),
        device=torch.device(layout.engine.device),
        scheduled=layout.engine.lr_scheduler is not None,
    )


def _node(device: torch.device) -> tuple[int, int]:
    """Ranks of a node, as the launcher says, and the cores they share; one rank where nodes differ. Collective."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    at_once = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    mine = size, at_once if device.type == "cpu" and size > at_once else 0
    return mine if len(set(gathered(mine))) == 1 else (1, 0)


def agreed_costs(device: torch.device, file: str | None) -> CostModel:
    """The cost model, the same on every rank of the job. Collective.

    Args:
        file: ``assignment.costs``.

    Raises:
        ValueError: on every rank, if one could not read the file, or has read another one.
    """
    node_size, node_cores = _node(device)
    costs = replace(BUILTIN["cpu" if device.type == "cpu" else "cuda"], node_size=node_size, node_cores=node_cores)
    if file is None:
        return costs
    with failing_together("ds_kfac: costs", None, ValueError):
        costs = measured(costs, file)
    if len(set(gathered(costs))) > 1:
        raise ValueError(f"kfac.assignment.costs: {file} is not the same on all ranks")
    return costs


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


    Raises:
        ValueError: on every rank: their plans differ in what changes results.
    """
    target, plan = targets[0], plans[0]
    if target.domain.shard[1] == 1:
        return
    if len(set(gathered(str(plan.wire)))) > 1:
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards are so different in size that their plans for the layers they "
            'have copies of differ in the dtype on the wire; set "dtype" in kfac.communication'
        )
