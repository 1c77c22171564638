"""From an engine to its :class:`Job`: its domains, their layers, a plan for each, and what preconditions them."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger

from ds_kfac.assignment.costs import BUILTIN, CostModel, kept_bytes, packed_bytes
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.base import UpdateRule
from ds_kfac.engine.refusals import check_model
from ds_kfac.model.expert_rows import ExpertRows
from ds_kfac.model.registry import SHARDS
from ds_kfac.model.scan import Scan, scan
from ds_kfac.ops import dispatch
from ds_kfac.plan.plan import EngineFacts, Plan, make_plan
from ds_kfac.step.draft import EngineView
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.zero.layout import parameter_groups
from ds_kfac.zero.registry import Domain, check_names, domains, self_test, shard_layout
from ds_kfac.zero.shards import held_by_layer, parameter_names, pieces_of


def assembled(
    engine: Any, config: KFACConfig, answers: tuple[str, ...], rule: UpdateRule, experts: ExpertRows | None
) -> tuple[Job, tuple[Scan, ...]]:
    """Collective. Returns the job, tested, and what was found in each of its domains. Raises on every rank: ValueError
    if there is nothing to precondition, or no plan; RuntimeError if the self-test failed."""
    optimized = [param for group in parameter_groups(engine.optimizer) for param in group]
    parts = domains(engine, optimized)
    several = bool(parts[0].name)
    _choose_backend(engine, config)
    costs, sequence = _costs(torch.device(engine.device)), _sequence(engine)
    # one stage may have no layers, or too little memory
    headline = "ds_kfac cannot attach to this model-parallel engine"
    together: Any = partial(failing_together, headline, torch.distributed.group.WORLD, ValueError)
    agreeing = together if several else nullcontext
    with agreeing():
        found = scan(engine.module, rule.scanned(config), optimized=optimized)
        found = replace(found, layers=rule.cut(config, found.layers))
        pairs = _by_domain(found, parts)
        views = [_engine_view(engine, domain, part, rule, experts) for domain, part in pairs]
        plans = [
            make_plan(view.layers, _engine_facts(view, config, sequence), budget, costs, answers)
            for view, budget in zip(views, _budgets(views, config), strict=True)
        ]
        for view in views:
            rule.check_groups(view.model, view.layers, view.layout, view.other_params)
    _check_copies(views, plans)
    preconditioners = [KFACPreconditioner(view, plan) for view, plan in zip(views, plans, strict=True)]
    job = Job(preconditioners, everywhere=several)
    try:
        with agreeing():
            for kfac in preconditioners:
                self_test(kfac.exchange, kfac.channel)
        check_model(engine.module, config)
        check_names([name for kfac in preconditioners for name in kfac.names.values()])
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


def _engine_view(engine: Any, domain: Domain, found: Scan, rule: UpdateRule, experts: ExpertRows | None) -> EngineView:
    """A domain's layers and where the engine keeps their gradients."""
    named = dict(engine.module.named_parameters())
    ours = [named[name] for name in parameter_names(found.layers)]
    own_ids = {id(parameter) for parameter in ours}
    return EngineView(
        model=engine.module,
        layers=found.layers,
        layout=shard_layout(engine, ours, domain.group, pieces_of(found.layers)),
        other_params=shard_layout(engine, [p for p in domain.params if id(p) not in own_ids], domain.group),
        inner=engine.basic_optimizer,
        rule=rule,
        domain=domain,
        info_of=experts,
    )


def _engine_facts(view: EngineView, config: KFACConfig, sequence: int) -> EngineFacts:
    """What a plan has to know of the engine."""
    layout = view.layout
    return EngineFacts(
        world=layout.world,
        held=None if layout.replicated else held_by_layer(view.layers, layout.shards),
        parameters=layout.params[0].dtype,
        gradients=layout.dtype,
        moments=view.rule.moments_count(config),
        device=torch.device(layout.engine.device),
        scheduled=layout.engine.lr_scheduler is not None,
        sequence=sequence,
        rotates=view.rule.rotates(config),
    )


def _sequence(engine: Any) -> int:
    """So many consecutive ranks have the parts of one sequence; all ranks where they are not consecutive. Collective
    under sequence parallelism."""
    size = engine.sequence_parallel_size
    if size == 1:
        return 1
    every = torch.distributed.get_process_group_ranks(engine.seq_data_parallel_group)
    mine = [every.index(rank) for rank in torch.distributed.get_process_group_ranks(engine.seq_parallel_group)]
    first = min(mine)
    consecutive = sorted(mine) == list(range(first, first + size)) and first % size == 0
    return size if all(gathered(consecutive)) else len(every)


def _node(device: torch.device) -> tuple[int, int]:
    """Ranks of a node, as the launcher says, and the cores they share; one rank where nodes differ. Collective."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    at_once = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    mine = size, at_once if device.type == "cpu" and size > at_once else 0
    return mine if len(set(gathered(mine))) == 1 else (1, 0)


def _costs(device: torch.device) -> CostModel:
    """The builtin cost model with this job's nodes, the same on every rank. Collective."""
    node_size, node_cores = _node(device)
    return replace(BUILTIN["cpu" if device.type == "cpu" else "cuda"], node_size=node_size, node_cores=node_cores)


def _by_domain(found: Scan, domains: Sequence[Domain]) -> list[tuple[Domain, Scan]]:
    """The layers of each domain that has some; what was skipped, in the first of them."""
    pairs: list[tuple[Domain, Scan]] = []
    for domain in domains:
        layers, shards = [], domain.shard[1]  # so many tensor-parallel ranks have a part of a layer, or a copy
        for layer in (layer for layer in found.layers if layer.weight in domain.names):
            cut = (1, shards) if SHARDS.get(layer.kind) else (shards, 1)
            layers.append(replace(layer, cut=cut) if layer.kind in SHARDS else replace(layer, copies=shards))
        if layers:
            pairs.append((domain, Scan(tuple(layers), () if pairs else found.skipped)))
    return pairs


def _budgets(views: Sequence[EngineView], config: KFACConfig) -> list[KFACConfig]:
    """The config of each domain here: they share a rank's memory budget as their layers need it."""
    budget = config.assignment.memory_budget_gb
    if budget is None or len(views) == 1:
        return [config] * len(views)
    method = METHODS[config.preconditioner.method]
    needs = [
        sum(packed_bytes(side) + kept_bytes(side, method) for layer in view.layers for side in (layer.A, layer.G))
        / view.layout.world
        for view in views
    ]
    return [config.having("assignment", memory_budget_gb=budget * need / sum(needs)) for need in needs]


def _check_copies(views: Sequence[EngineView], plans: Sequence[Plan]) -> None:
    """What tensor-parallel ranks have copies of must be treated alike by all of them, though its owners differ. So all
    that depends on an owner is alike for copies: they have the rows of all ranks, rounded as what travels
    (``comm/reduce.py``, ``step/messages.py``, ``zero/exchange.py``), and no offsets. Collective under tensor
    parallelism; raises ValueError on every rank if plans differ in what is left."""
    if views[0].domain.shard[1] > 1 and len(set(gathered((str(plans[0].wire), plans[0].lag)))) > 1:
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards are so different in size that their plans for the layers they "
            'have copies of differ in the dtype on the wire or in the lag; set "dtype" in kfac.communication and "lag" '
            "in kfac.eigenbasis"
        )
