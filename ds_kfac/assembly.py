"""From an engine to its :class:`Job`: domains, their layers, a plan for each, and the optimizers that follow them."""

import os
from dataclasses import replace
from typing import Any

import torch

from ds_kfac import parallelism
from ds_kfac.adam_groups import check_groups
from ds_kfac.agreement import failing_together
from ds_kfac.config import KFACConfig
from ds_kfac.costs import BUILTIN, CostModel, from_dict
from ds_kfac.experts import ExpertRows
from ds_kfac.job import Job
from ds_kfac.measured_costs import cached
from ds_kfac.ops import backends
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.scan import Scan, scan
from ds_kfac.strategy import Setting, make_plan
from ds_kfac.target import Target, moments_of
from ds_kfac.zero.domains import Domain, domains
from ds_kfac.zero.regions import held_by_layer, parameter_names
from ds_kfac.zero.registry import optimized_parameters, shard_layout
from ds_kfac.zero.selftest import self_test


def assemble(engine: Any, config: KFACConfig, experts: ExpertRows | None) -> tuple[Job, tuple[Scan, ...]]:
    """Collective: call on every rank. Returns the job, tested, and what was found in each of its domains.

    Raises:
        ValueError: nothing to precondition, or a plan that cannot be made; on every rank.
        RuntimeError: the self-test failed.
    """
    parallelism.check(engine, config)
    optimized = optimized_parameters(engine)
    parts = domains(engine, optimized)
    several = bool(parts[0].name)
    _choose_backend(engine, config)
    costs = agreed_costs(torch.device(engine.device), config)
    with parallelism.agreeing(several):  # one stage may have no layers, or too little memory
        found = scan(engine.module, config.choice, optimized=optimized)
        pairs = parallelism.by_domain(found, parts)
        targets = [make_target(engine, domain, part, experts) for domain, part in pairs]
        budgets = parallelism.budgets(targets, config)
        plans = [
            make_plan(target.layers, setting(target, config), budget, costs)
            for target, budget in zip(targets, budgets, strict=True)
        ]
        for target in targets:
            check_groups(target)
    parallelism.check_copies(targets, plans)
    optimizers = [KFACOptimizer(target, config, plan) for target, plan in zip(targets, plans, strict=True)]
    job = Job(optimizers, everywhere=several)
    try:
        with parallelism.agreeing(several):
            for kfac in optimizers:
                self_test(kfac.layout, kfac.exchange.plan.of_parameter, kfac.channel)
    except Exception:
        job.close()
        raise
    return job, tuple(part for _, part in pairs)


def _choose_backend(engine: Any, config: KFACConfig) -> None:
    """Build what is missing. One that was asked for and cannot run on some rank is an error on all of them; one that
    was not is used nowhere then: replicas that round differently would drift apart."""
    name, device = config.ops.backend, torch.device(engine.device).type
    if name is None:
        with failing_together("ds_kfac cannot attach", torch.distributed.group.WORLD):
            own = dict(backends.use(None, device).missing)
        everyone: list[dict[str, str]] = [own] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, own)
        lacking = {
            backend: f"rank {rank}: {why}" for rank, missing in enumerate(everyone) for backend, why in missing.items()
        }
        if lacking.keys() - own:
            backends.use(None, device, without={**lacking, **own})
        return
    with failing_together("ds_kfac cannot attach", torch.distributed.group.WORLD, ValueError):
        backends.use(name, device)


def make_target(engine: Any, domain: Domain, found: Scan, experts: ExpertRows | None) -> Target:
    """A domain's layers and where the engine keeps their gradients."""
    named = dict(engine.module.named_parameters())
    ours = [named[name] for name in parameter_names(found.layers)]
    own_ids = {id(parameter) for parameter in ours}
    return Target(
        model=engine.module,
        layers=found.layers,
        layout=shard_layout(engine, ours, domain.group),
        rest=shard_layout(engine, [p for p in domain.params if id(p) not in own_ids], domain.group),
        inner=engine.basic_optimizer,
        scheduled_lr=engine.lr_scheduler is not None,
        domain=domain,
        info_of=experts,
    )


def setting(target: Target, config: KFACConfig) -> Setting:
    """What a plan has to know of the engine."""
    layout = target.layout
    kind = moments_of(config, target.inner)
    return Setting(
        world=layout.world,
        held=None if layout.replicated else held_by_layer(target.layers, layout.shards),
        parameters=layout.params[0].dtype,
        gradients=layout.dtype,
        moments={"adam": 2, "corrected": 1, None: 0}[kind],
    )


def _node(device: torch.device) -> tuple[int, int]:
    """Ranks of a node, as the launcher says, and the cores they share; one rank where nodes differ. Collective."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    at_once = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    mine = size, at_once if device.type == "cpu" and size > at_once else 0
    everyone = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return mine if len(set(everyone)) == 1 else (1, 0)


def agreed_costs(device: torch.device, config: KFACConfig) -> CostModel:
    """The cost model, the same on every rank of the job: measured by the first one. Collective."""
    given, base = config.assignment.costs, BUILTIN["cpu" if device.type == "cpu" else "cuda"]
    node_size, node_cores = _node(device)
    base = replace(base, node_size=node_size, node_cores=node_cores)
    if isinstance(given, dict):
        return from_dict(given, base)
    if given == "builtin":
        return base
    values: list[Any] = [cached(device).to_dict() if torch.distributed.get_rank() == 0 else {}]
    torch.distributed.broadcast_object_list(values, src=0)
    return replace(from_dict(values[0], base), node_size=base.node_size, node_cores=base.node_cores)
