"""From an engine to its :class:`Job`: the engine's domains, and each one's layers, plan and
preconditioner."""

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
    """The job of an engine, self-tested, and its layers and what was skipped. Collective. Raises on
    every rank: ValueError if there is nothing to precondition, or no plan fits; RuntimeError if the
    self-test failed."""
    optimized = [param for group in parameter_groups(engine.optimizer) for param in group]
    parts = domains(engine, optimized)
    several, seam = bool(parts[0].name), Seam(engine)
    _choose_backend(engine, config)
    costs, sequence = _costs(torch.device(engine.device)), _sequence(engine)
    head_shapes = _head_shapes(engine)
    # a single pipeline stage may have no layers, or too little memory: all ranks must fail together
    headline = "ds_kfac cannot attach to this model-parallel engine"
    together: Any = partial(failing_together, headline, torch.distributed.group.WORLD, ValueError)
    agreeing = together if several else nullcontext
    with agreeing():
        scanned = scan(
            engine.module, rule.scanned(config), optimized=optimized, head_shapes=head_shapes
        )
        of_domains = _by_domain(rule.cut(config, scanned.layers), parts)
        views = [_engine_view(engine, domain, layers, rule, seam) for domain, layers in of_domains]
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
    """Build and check the backends of operations. If one that the config names cannot run on some
    rank, that is an error on all of them. A backend that it does not name, or an op that computes
    wrongly on some rank, is then used on no rank: replicas that round differently would drift
    apart."""
    name, device = config.ops.backend, torch.device(engine.device).type
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
    """A domain's layers, and where the engine keeps their gradients."""
    named = dict(engine.module.named_parameters())
    ours = [named[name] for name in parameter_names(layers)]
    our_ids = {id(parameter) for parameter in ours}
    return EngineView(
        model=engine.module,
        layers=layers,
        layout=shard_layout(engine, ours, domain.group, parts_of(layers), seam),
        other_params=tuple(p for p in domain.params if id(p) not in our_ids),
        inner=engine.basic_optimizer,
        rule=rule,
        domain=domain,
        seam=seam,
    )


def _engine_facts(view: EngineView, config: KFACConfig, sequence: int) -> EngineFacts:
    """The facts about the engine that its plan depends on."""
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
    """Return the shapes by which this rank's last layer is a language model's head; None: those of
    its embeddings.

    In a pipeline the embeddings are in the first stage and the head is in the last one. The last
    layer of any other stage is no head, even if it has an embedding's shape. Collective in a
    pipeline.
    """
    if not isinstance(engine, PipelineEngine):
        return None
    of_all_stages = set[tuple[int, int]]().union(*gathered(embedding_shapes(engine.module)))
    return of_all_stages if engine.is_last_stage() else set()


def _sequence(engine: Any) -> int:
    """Number of consecutive ranks that hold the parts of one sequence; of all ranks if they are not
    consecutive. Collective under sequence parallelism."""
    size = engine.sequence_parallel_size
    if size == 1:
        return 1
    every = torch.distributed.get_process_group_ranks(engine.seq_data_parallel_group)
    places = [
        every.index(rank)
        for rank in torch.distributed.get_process_group_ranks(engine.seq_parallel_group)
    ]
    first = min(places)
    consecutive = sorted(places) == list(range(first, first + size)) and first % size == 0
    return size if all(gathered(consecutive)) else len(every)


def _costs(device: torch.device) -> CostModel:
    """The builtin cost model with this job's nodes by the launcher, if they are alike, the same on
    every rank. Collective."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    at_once = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    node = size, at_once if device.type == "cpu" and size > at_once else 0
    node_size, node_cores = node if len(set(gathered(node))) == 1 else (1, 0)
    return replace(
        BUILTIN["cpu" if device.type == "cpu" else "cuda"],
        node_size=node_size,
        node_cores=node_cores,
    )


def _by_domain(
    layers: Sequence[LayerSpec], domains: Sequence[Domain]
) -> list[tuple[Domain, tuple[LayerSpec, ...]]]:
    """The domains that have layers, each with its own."""
    pairs: list[tuple[Domain, tuple[LayerSpec, ...]]] = []
    for domain in domains:
        # number of tensor-parallel ranks, each with a part of a layer or a copy
        own, shards = [], domain.shard[1]
        for layer in (layer for layer in layers if layer.weight in domain.names):
            cut = (1, shards) if SHARDS.get(layer.kind) else (shards, 1)
            own.append(
                replace(layer, cut=cut) if layer.kind in SHARDS else replace(layer, copies=shards)
            )
        pairs += [(domain, tuple(own))] if own else []
    return pairs


def _budgets(views: Sequence[EngineView], config: KFACConfig) -> list[KFACConfig]:
    """A config for each of this rank's domains; their layers' needs divide the memory budget."""
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
    """Raise ValueError on every rank if tensor-parallel ranks would step their copies of a layer
    differently. Collective under tensor parallelism.

    The copies' owners differ from plan to plan, so nothing about a copy may depend on its owner: it
    has the rows of all ranks, is rounded as if it travelled (``comm/reduce.py``,
    ``step/messages.py``, ``zero/exchange.py``), and has no offset. What is left is the dtype on the
    wire, which is compared here.
    """
    if views[0].domain.shard[1] > 1 and len(set(gathered(str(plans[0].wire)))) > 1:
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards are so different in size that their plans "
            "for the layers they "
            'have copies of differ in the dtype on the wire; set "dtype" in kfac.communication'
        )
