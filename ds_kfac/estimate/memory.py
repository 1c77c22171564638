"""Bytes that a plan takes of every rank, kind by kind. Pure."""

from collections.abc import Mapping

import numpy as np
import torch

from ds_kfac.assignment.work import Work, kept_bytes, packed_bytes
from ds_kfac.comm.reduce import IN_FLIGHT, Layout
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.directions.base import UpdateRule
from ds_kfac.estimate.period import burn_in, settled_period
from ds_kfac.estimate.traffic import Keys, PlannedTraffic, message_bytes
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.moments import AdamMoments
from ds_kfac.update.stacking import stacks

STATE = ("factors", "history", "eigenbases", "moments")
"""What is kept between steps; with the inverse method, inverses are counted as eigenbases."""
TRANSIENT = ("sums", "messages", "drafts")
"""What a step that captures everything needs in addition, while it lasts: sums that are made or averaged here, the
messages that are on their way at a time, and what is kept until DeepSpeed has applied the step: what moments will take
in, and factors and eigenbases, as many as any step renews."""
BESIDE = "beside"
"""The most of it at a time in any step, with the gradients and results of this rank's layers."""
FP32, COUNTER, NORMS = 4, 4, 8
"""Bytes of a number, of the counter of a layer's moments, of the norms of a history."""


def memory_of(traffic: PlannedTraffic, config: KFACConfig, rule: UpdateRule) -> Mapping[str, np.ndarray]:
    """Kind -> bytes [W], once everything is there."""
    plan, moments = traffic.plan, rule.moments(config)
    assignment, world = plan.assignment, plan.assignment.world
    memory = {kind: np.zeros(world, dtype=np.int64) for kind in (*STATE, *TRANSIENT, BESIDE)}
    renewed: dict[str, list[tuple[list[int], int]]] = {}  # factor -> who has how much of it
    exact = np.zeros(world, dtype=np.int64)
    for factor in assignment.factors:
        home = assignment.decomposers[factor.key]
        memory["factors"][home] += packed_bytes(factor.side)
        # the last value is the factor itself
        memory["history"][home] += 4 * factor.side.numel + NORMS if plan.adaptive else 0
        users = sorted(Work.users(factor, assignment.workers))
        memory["eigenbases"][users] += kept_bytes(factor.side, plan.method)
        rounded = plan.wire is not torch.float32 and bool(traffic.delivery.receivers[factor.key])
        renewed[factor.key] = [([home], packed_bytes(factor.side)), (users, kept_bytes(factor.side, plan.method))]
        if rounded:  # until the rounded one has been sent
            exact[home] += kept_bytes(factor.side, plan.method)
    waits = plan.waits.itemsize if moments is AdamMoments else FP32
    stored = FP32 if config.communication.gradient_dtype else plan.gradient_dtypes[0].itemsize  # of gradients, at most
    for layer in plan.layers:
        workers = list(assignment.workers[layer.name])
        for side in (layer.A, layer.G):
            # the ones of an identity
            memory["eigenbases"][workers] += kept_bytes(side, plan.method) if side.block == 0 else 0
        memory["moments"][workers] += (FP32 * moments.COUNT * layer.numel + COUNTER) if moments else 0
        memory["drafts"][workers] += waits * layer.numel if moments else 0

    memory["sums"] += _sums(traffic.every, traffic.layout, world)
    new = _most_renewed(traffic, renewed, memory["factors"])
    memory["drafts"] += new
    gather, scatter = ({}, {}) if world == 1 else (traffic.gather(traffic.every, traffic.every), traffic.scatter)
    zero = np.zeros(world, dtype=np.int64)
    in_backward = _under_way(traffic, traffic.every, traffic.layout)
    memory["messages"] += np.max([in_backward, zero + message_bytes(gather), zero + message_bytes(scatter)], axis=0)
    outgoing, staying = (_of_ranks(kind, world) for kind in (traffic.outgoing, traffic.staying))
    gathered, working = _working(traffic, rule, stored, waits if moments else 0)
    # results that go are given up once they are in a message
    sending = np.maximum(outgoing + message_bytes(scatter, received=False), message_bytes(scatter)) + staying
    arrived = message_bytes(gather) - message_bytes(gather, received=False)
    memory[BESIDE] += np.max(
        [
            _captured(traffic),
            new + arrived + np.maximum(exact, gathered),
            new + working,
            memory["drafts"] + sending,
        ],
        axis=0,
    )
    return memory


def _of_ranks(nbytes: Mapping[tuple[int, int], int], world: int) -> np.ndarray:
    """[W], of all parameters."""
    found = np.zeros(world, dtype=np.int64)
    for (rank, _), n in nbytes.items():
        found[rank] += n
    return found


def _working(traffic: PlannedTraffic, rule: UpdateRule, stored: int, waits: int) -> np.ndarray:
    """Bytes [2, W] of gathered gradients, and the most of what is left of them, of what takes their places, and of
    what making that takes.

    Args:
        stored, waits: bytes of a gradient's element, as it is stored and as it waits for its moments.
    """
    found = np.zeros((2, traffic.world), dtype=np.int64)
    for rank, own in enumerate(_stacks(traffic.plan)):
        rounds, done, most = rule.rounds(traffic.plan, own), 0, 0
        found[0, rank] = left = stored * sum(traffic.gathered(layer, rank) for some, _ in rounds for layer in some)
        for layers, nbytes in rounds:
            left -= stored * sum(traffic.gathered(layer, rank) for layer in layers)
            done += sum(waits * layer.numel for layer in layers)
            most = max(most, left + done + nbytes)
            done += sum(traffic.results(layer, rank) for layer in layers)
        found[1, rank] = max(most, done)
    return found


def _stacks(plan: Plan) -> list[tuple[tuple[LayerSpec, ...], ...]]:
    """Each rank's layers, those together that are computed at once."""
    owned: list[list[LayerSpec]] = [[] for _ in range(plan.assignment.world)]
    for layer in plan.layers:
        for rank in plan.assignment.workers[layer.name]:
            owned[rank].append(layer)
    return [stacks(layers, alike=(lambda layer: layer.copies) if plan.stacks else None) for layers in owned]


def _sums(keys: Keys, layout: Layout, world: int) -> np.ndarray:
    """Bytes [W] of the sums of some factors, where they are made or averaged."""
    found = np.zeros(world, dtype=np.int64)
    for slot in layout.slots(keys, 0):
        found[list({slot.owner, *slot.contributors})] += FP32 * slot.numel
    return found


def _under_way(traffic: PlannedTraffic, keys: Keys, layout: Layout) -> np.ndarray:
    """Bytes [W] of the messages of sums that are on their way at a time, at most."""
    zero = np.zeros(traffic.world, dtype=np.int64)
    messages = traffic.reductions(keys, layout) if traffic.world > 1 else []
    under_way = [zero, *(zero + message_bytes(message) for message in messages)]
    return np.max([sum(under_way[i : i + IN_FLIGHT], zero) for i in range(len(under_way))], axis=0)


def _captured(traffic: PlannedTraffic) -> np.ndarray:
    """Bytes [W] of sums and their messages in the step that has most of them, rank by rank: the first captures all, by
    ranks of its own, later ones what is due."""
    due = {step.captured for step in (*burn_in(traffic.plan), *settled_period(traffic.plan))}
    steps = [(traffic.every, traffic.first), *((keys, traffic.layout) for keys in due)]
    found = [_sums(keys, layout, traffic.world) + _under_way(traffic, keys, layout) for keys, layout in steps]
    return np.max(found, axis=0)


def _most_renewed(
    traffic: PlannedTraffic, of: Mapping[str, list[tuple[list[int], int]]], first: np.ndarray
) -> np.ndarray:
    """Bytes [W] of new factors and eigenbases in the step that has most of them, rank by rank. ``first``: of the first
    step, before which there are no eigenbases, but factors, which are zero."""
    most = first.copy()
    for step in {*burn_in(traffic.plan), *settled_period(traffic.plan)}:
        found = np.zeros(traffic.world, dtype=np.int64)
        for index, keys in enumerate((step.captured, step.arriving)):
            for key in keys:
                ranks, nbytes = of[key][index]
                found[ranks] += nbytes
        most = np.maximum(most, found)
    return most


def state_bytes(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bytes [W] between steps."""
    return np.sum([memory[kind] for kind in STATE], axis=0)


def transient_bytes(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bytes [W] in addition to them in any step, one that captures and refreshes everything included, as the first
    does."""
    return memory[BESIDE]
