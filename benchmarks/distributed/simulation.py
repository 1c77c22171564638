"""Large models on 8 to 1024 ranks, from the plan alone: imbalance, bytes per rank and seconds per
step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.distributed.cases import REFRESH, UPDATE, workers_of
from benchmarks.distributed.plan import planned_traffic, total
from benchmarks.distributed.tables import TABLES, Table
from ds_kfac.assignment.costs import BUILTIN, CostModel, capture_flops
from ds_kfac.config.keys import parse
from ds_kfac.config.resolve import resolve
from ds_kfac.plan.plan import EngineFacts, Observations, Plan, make_plan
from ds_kfac.zero.shards import Shard, ShardMap, partition_chunks

MODELS = tuple(TABLES)
WORLDS = tuple(2**power for power in range(3, 13))
STRATEGIES = ("MEM-OPT", "HYBRID", "COMM-OPT", "ZeRO-3")
GIGABITS = (10, 100, 400)
ROWS = 4096
"""Tokens a rank captures in an update step."""


def simulate(
    worlds: Sequence[int] = WORLDS, models: Sequence[str] = tuple(TABLES)
) -> list[dict[str, Any]]:
    """A row for every model, strategy and world."""
    return [
        {
            "model": model,
            "strategy": strategy,
            "world": world,
            **simulated(TABLES[model](), strategy, world),
        }
        for model in models
        for strategy in STRATEGIES
        for world in worlds
    ]


def simulated(table: Table, strategy: str, world: int) -> dict[str, Any]:
    """Bytes are of the rank that sends or receives most, memory of the fullest; a model of bf16, so
    2 bytes a number.

    Seconds: of the busiest rank's K-FAC work (preconditioning, folding, decompositions) and of its
        captures,
    then its bytes at the link's speed, one after the other; without latency, overlap or the
    training step itself.
    """
    plan, shards = planned(table, strategy, world)
    flows = planned_traffic(plan, shards)
    flow, statistics = total(flows), flows["factors"]
    nbytes = max(*flow.sent, *flow.received)
    costs = _without_links(BUILTIN["cuda"])
    work = dataclasses.replace(plan.assignment.work, costs=costs)
    loads = work.loads(plan.assignment.workers, plan.assignment.eigen_workers)
    captures = [0.0] * world
    for factor in plan.assignment.factors:
        for rank in plan.contributors.of(factor.key, plan.assignment.eigen_workers[factor.key], 0):
            captures[rank] += capture_flops(factor.side, ROWS) / costs.syrk_flops / UPDATE
    capture = max(captures)
    return {
        "workers": plan.workers,
        "layers": len(plan.layers),
        "imbalance": max(loads) * world / sum(loads),
        "statistics": max(*statistics.sent, *statistics.received),
        "bytes": nbytes,
        "memory": max(plan.assignment.memory),
        "compute_seconds": max(loads) + capture,
        "seconds": {
            str(gigabits): max(loads) + capture + nbytes / (gigabits * 1e9 / 8)
            for gigabits in GIGABITS
        },
    }


def planned(table: Table, strategy: str, world: int) -> tuple[Plan, ShardMap]:
    """As ds_kfac plans it when it attaches, and after the first step has found the shared
    inputs."""
    replicated = strategy != "ZeRO-3"
    shards = _shards(table, world, replicated=replicated)
    block: dict[str, Mapping[str, Any]] = {
        "factor": {"update_interval": UPDATE},
        "eigenbasis": {"refresh_interval": REFRESH},
        "burn_in": {"steps": 0},
        "communication": {"dtype": "bf16"},
    }
    if replicated:
        block["assignment"] = {"gradient_worker_fraction": workers_of(strategy, world) / world}
    facts = EngineFacts(
        world=world,
        held=None
        if replicated
        else {layer.name: shards.held([i]) for i, layer in enumerate(table.layers)},
        parameters=torch.bfloat16,
        gradients=torch.bfloat16,
        moments=0,
    )
    plan = make_plan(
        table.layers, facts, resolve(parse(block), fisher="empirical")[0], BUILTIN["cuda"]
    )
    return plan.with_observations(
        Observations(table.shared, {layer.name: float(ROWS) for layer in table.layers})
    ), shards


def _shards(table: Table, world: int, *, replicated: bool) -> ShardMap:
    shards: list[Shard] = []
    for index, layer in enumerate(table.layers):
        if replicated:
            shards += [Shard(index, 0, layer.numel, rank, 0, 0) for rank in range(world)]
        else:
            shards += partition_chunks(layer.numel, index, 0, 0, world)
    return ShardMap(world, tuple(layer.numel for layer in table.layers), tuple(shards))


def _without_links(costs: CostModel) -> CostModel:
    """Bytes are counted apart."""
    return dataclasses.replace(costs, link_bytes=1e30, link_seconds=0.0)
