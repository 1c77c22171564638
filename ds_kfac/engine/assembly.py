"""Assemble the :class:`Job` of an engine: find the engine's domains (a domain is a group of ranks
and the parameters that it trains, see ``zero/registry.py``), and make the layers, the plan and the
preconditioner of each domain."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import attrgetter
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_kfac.assignment.costs import BUILTIN, CostModel, basis_bytes, packed_bytes
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.base import UpdateRule
from ds_kfac.engine.refusals import check_model
from ds_kfac.log import warn
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import SHARDS
from ds_kfac.model.scan import Scan, embedding_shapes, scan
from ds_kfac.ops import dispatch
from ds_kfac.plan.plan import EngineFacts, Plan, make_plan
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.step.view import EngineView
from ds_kfac.zero.layout import parameter_groups
from ds_kfac.zero.registry import Domain, check_names, domains, shard_layout
from ds_kfac.zero.seam import Seam
from ds_kfac.zero.self_test import self_test
from ds_kfac.zero.shards import held_by_layer, parameter_names, parts_of


def assembled(
    engine: Any, config: KFACConfig, answers: tuple[str, ...], rule: UpdateRule
) -> tuple[Job, Scan]:
    """Make an engine's job and run its self-test. Returns the job, and the scan of the engine's
    model. Collective.

    Args:
        engine: the DeepSpeed engine.
        config: the "kfac" block without nulls, as ``rule.resolved`` returns it.
        answers: texts for the report, one about each value that was chosen in place of a null.
        rule: the update rule of the engine's optimizer.

    Raises:
        ValueError: on every rank, if no layer can be preconditioned, or if no plan can be made, for
            example because K-FAC would need more memory than the config allows.
        RuntimeError: on every rank, if the self-test fails.
    """
    optimized = [param for group in parameter_groups(engine.optimizer) for param in group]
    engine_domains = domains(engine, optimized)
    is_model_parallel = bool(engine_domains[0].name)
    seam = Seam(engine)
    _choose_backend(engine, config)
    costs = _costs(torch.device(engine.device))
    sequence = _sequence(engine)
    head_shapes = _head_shapes(engine)
    # if a single pipeline stage has no layers, or too little memory, all ranks must fail together
    headline = "ds_kfac cannot attach to this model-parallel engine"
    together: Any = partial(failing_together, headline, torch.distributed.group.WORLD, ValueError)
    agreeing = together if is_model_parallel else nullcontext
    with agreeing():
        scanned = scan(
            engine.module, rule.scanned(config), optimized=optimized, head_shapes=head_shapes
        )
        by_domain = _by_domain(rule.cut(config, scanned.layers), engine_domains)
        views = [_engine_view(engine, domain, layers, rule, seam) for domain, layers in by_domain]
        plans = [
            make_plan(view.layers, _engine_facts(view, config, sequence), budget, costs, answers)
            for view, budget in zip(views, _budgets(views, config), strict=True)
        ]
        for view in views:
            rule.check_groups(view.model, view.layers, view.layout, view.other_params)
    _check_copies(views, plans)
    preconditioners = [
        KFACPreconditioner(view, plan) for view, plan in zip(views, plans, strict=True)
    ]
    job = Job(preconditioners)
    try:
        with agreeing():
            for kfac in preconditioners:
                self_test(kfac.exchange, kfac.channel)
        check_model(engine.module, config)
        check_names([name for kfac in preconditioners for name in kfac.names.values()])
    except Exception:
        job.close()
        raise
    return job, replace(
        scanned, layers=tuple(layer for kfac in preconditioners for layer in kfac.layers)
    )


def _choose_backend(engine: Any, config: KFACConfig) -> None:
    """Build and check the backends of operations.

    If the config names a backend that does not run on every rank, all ranks raise an error. If the
    config names no backend, a backend is used only if it runs on every rank, and an operation of a
    backend is used only if its results are right on every rank. If ranks used different backends,
    their copies of a weight would be rounded differently and drift apart.
    """
    name = config.ops.backend
    device = torch.device(engine.device).type
    error = RuntimeError if name is None else ValueError
    with failing_together("ds_kfac cannot attach", torch.distributed.group.WORLD, error):
        choice = dispatch.use(name, device)
    everyone = enumerate(gathered(dict(choice.missing)))
    lacking = {
        what: f"rank {rank}: {why}" for rank, missing in everyone for what, why in missing.items()
    }
    if lacking.keys() - choice.missing:
        choice = dispatch.use(name, device, without={**lacking, **choice.missing})
    if choice.replaced:
        warn(f"plain torch runs instead, on all ranks: {'; '.join(choice.replaced.values())}")


def _engine_view(
    engine: Any, domain: Domain, layers: tuple[LayerSpec, ...], rule: UpdateRule, seam: Seam
) -> EngineView:
    """Return what a preconditioner must know about one domain: its layers, and where the engine
    keeps their gradients."""
    named = dict(engine.module.named_parameters())
    ours = [named[name] for name in parameter_names(layers)]
    our_params = set(ours)
    return EngineView(
        model=engine.module,
        layers=layers,
        layout=shard_layout(engine, ours, domain.group, parts_of(layers), seam),
        other_params=tuple(p for p in domain.params if p not in our_params),
        inner=engine.basic_optimizer,
        rule=rule,
        domain=domain,
        seam=seam,
    )


def _engine_facts(view: EngineView, config: KFACConfig, sequence: int) -> EngineFacts:
    """Return the facts about the engine on which its plan depends."""
    layout = view.layout
    return EngineFacts(
        world=layout.world,
        held=None if layout.replicated else held_by_layer(view.layers, layout.shards),
        parameters=reduce(torch.promote_types, map(attrgetter("dtype"), layout.params)),
        gradients=layout.dtype,
        moments=view.rule.moments_count(config),
        device=torch.device(layout.engine.device),
        sequence=sequence,
        rotates=view.rule.rotates(config),
    )


def _head_shapes(engine: Any) -> set[tuple[int, int]] | None:
    """Return the weight shapes that identify this rank's last layer as a language model's head.
    Return None if these are the shapes of this rank's own embeddings.

    In a pipeline the embeddings are in the first stage, and the head is in the last stage. The last
    layer of any other stage is not a head, even if it has the shape of an embedding. Collective in
    a pipeline.
    """
    if not isinstance(engine, PipelineEngine):
        return None
    of_all_stages = set[tuple[int, int]]().union(*gathered(embedding_shapes(engine.module)))
    return of_all_stages if engine.is_last_stage() else set()


def _sequence(engine: Any) -> int:
    """Return the number of ranks that hold the parts of one sequence, if these ranks are
    consecutive. Otherwise return the number of all ranks. Collective under sequence parallelism."""
    size = engine.sequence_parallel_size
    if size == 1:
        return 1
    ranks_of = torch.distributed.get_process_group_ranks
    all_ranks = ranks_of(engine.seq_data_parallel_group)
    places = [all_ranks.index(rank) for rank in ranks_of(engine.seq_parallel_group)]
    first = min(places)
    are_consecutive = sorted(places) == list(range(first, first + size)) and first % size == 0
    return size if all(gathered(are_consecutive)) else len(all_ranks)


def _costs(device: torch.device) -> CostModel:
    """Return the builtin cost model. It is the same on every rank.

    If all nodes of the job are alike, the cost model has the number of processes per node, which
    the launcher sets in the environment. Collective.
    """
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    at_once = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    node_cores = at_once if device.type == "cpu" and node_size > at_once else 0
    are_alike = len(set(gathered((node_size, node_cores)))) == 1
    if not are_alike:
        node_size = 1
        node_cores = 0
    return replace(
        BUILTIN["cpu" if device.type == "cpu" else "cuda"],
        node_size=node_size,
        node_cores=node_cores,
    )


def _by_domain(
    layers: Sequence[LayerSpec], domains: Sequence[Domain]
) -> list[tuple[Domain, tuple[LayerSpec, ...]]]:
    """Return the domains that have layers, each with its layers."""
    pairs: list[tuple[Domain, tuple[LayerSpec, ...]]] = []
    for domain in domains:
        # each tensor-parallel rank has either a shard of a layer or a copy of the whole layer
        shards = domain.shard[1]
        domain_layers = []
        for layer in layers:
            if layer.weight not in domain.names:
                continue
            if layer.kind in SHARDS:
                cut = (1, shards) if SHARDS[layer.kind] else (shards, 1)
                domain_layers.append(replace(layer, cut=cut))
            else:
                domain_layers.append(replace(layer, copies=shards))
        if domain_layers:
            pairs.append((domain, tuple(domain_layers)))
    return pairs


def _budgets(views: Sequence[EngineView], config: KFACConfig) -> list[KFACConfig]:
    """Return a config for each of this rank's domains. The domains share the memory budget in
    proportion to what their layers need."""
    budget = config.assignment.memory_budget_gb
    if budget is None or len(views) == 1:
        return [config] * len(views)
    method = METHODS[config.preconditioner.method]
    needs = [
        sum(
            packed_bytes(side) + basis_bytes(side, method)
            for layer in view.layers
            for side in (layer.A, layer.G)
        )
        / view.layout.world
        for view in views
    ]
    return [
        config.having("assignment", memory_budget_gb=budget * need / sum(needs)) for need in needs
    ]


def _check_copies(views: Sequence[EngineView], plans: Sequence[Plan]) -> None:
    """Raise ValueError on every rank if tensor-parallel ranks would update their copies of a layer
    differently. Collective under tensor parallelism.

    Each tensor-parallel rank has its own plan, and these plans may let different ranks compute the
    result of a copied layer. So the result must not depend on which rank computes it. Three rules
    ensure this. A copied layer uses the rows of all ranks. Its values are rounded as if they were
    sent to another rank (``comm/reduce.py``, ``step/messages.py``, ``zero/exchange.py``). Its
    factors follow the schedule without an offset. Results would still differ if the plans' messages
    had different dtypes, so this function compares the dtypes.
    """
    if views[0].domain.shard[1] > 1 and len(set(gathered(str(plans[0].wire)))) > 1:
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards differ so much in size that their plans "
            "send messages in different dtypes. If several ranks have a copy of a layer, their "
            "copies would become different. Set kfac.communication.dtype"
        )
