"""Closed formulas of what a plan sends, from the plan alone: per rank, step and kind, amortised
over the intervals."""

from collections.abc import Mapping
from dataclasses import dataclass

from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import RelayoutPlan
from ds_kfac.plan.plan import Plan
from ds_kfac.step.messages import Delivery
from ds_kfac.zero.exchange import ExchangePlan
from ds_kfac.zero.shards import ShardMap


@dataclass(frozen=True)
class Flow:
    """Payload bytes per step that each rank sends to others and receives from them."""

    sent: tuple[float, ...]
    received: tuple[float, ...]


def planned_traffic(plan: Plan, shards: ShardMap) -> Mapping[str, Flow]:
    """Kind -> flow, as the channel counts them; without "numbers", a few bytes, and the buffers'
    alignment."""
    update, refresh = plan.schedule.intervals(plan.schedule.settled)
    gather, scatter = plan.gradient_dtypes
    assignment, wire = plan.assignment, plan.wire.itemsize
    exchange = ExchangePlan(shards, plan.layers, assignment.workers)
    return {
        "factors": _factors(plan, wire, update),
        "eigenvectors": _bases(plan, wire, refresh, vectors=True),
        "eigenvalues": _bases(plan, 4, refresh, vectors=False),
        "gradients": _moves(exchange.gather, gather.itemsize),
        "results": _moves(exchange.scatter, scatter.itemsize),
    }


def total(flows: Mapping[str, Flow]) -> Flow:
    """Of all kinds."""
    return Flow(
        *(
            tuple(map(sum, zip(*(getattr(f, way) for f in flows.values()), strict=True)))
            for way in ("sent", "received")
        )
    )


def _factors(plan: Plan, itemsize: int, update: int) -> Flow:
    """Contributors send their sums to the eigen workers: packed triangles, and an fp32 count
    each."""
    sent, received = [0.0] * plan.assignment.world, [0.0] * plan.assignment.world
    for factor in plan.assignment.factors:
        owner, size = (
            plan.assignment.eigen_workers[factor.key],
            (itemsize * factor.side.numel + 4) / update,
        )
        for rank in plan.contributors.of(factor.key, owner, 0):
            sent[rank] += size * (rank != owner)
            received[owner] += size * (rank != owner)
    return Flow(tuple(sent), tuple(received))


def _bases(plan: Plan, itemsize: int, refresh: int, *, vectors: bool) -> Flow:
    """From eigen workers to the gradient workers elsewhere."""
    assignment = plan.assignment
    delivery = Delivery(
        assignment.factors,
        assignment.eigen_workers,
        assignment.workers,
        world=assignment.world,
        wire=plan.wire,
    )
    sent, received = [0.0] * assignment.world, [0.0] * assignment.world
    for factor in assignment.factors:
        size = itemsize * _numel(factor, vectors) / refresh
        for rank in delivery.receivers[factor.key]:
            sent[assignment.eigen_workers[factor.key]] += size
            received[rank] += size
    return Flow(tuple(sent), tuple(received))


def _numel(factor: FactorSpec, vectors: bool) -> int:
    return factor.side.basis_numel if vectors else factor.side.dim


def _moves(plan: RelayoutPlan, itemsize: int) -> Flow:
    sent, received = [0.0] * plan.world, [0.0] * plan.world
    for move in plan.moves:
        sent[move.source] += itemsize * move.numel
        received[move.target] += itemsize * move.numel
    return Flow(tuple(sent), tuple(received))
