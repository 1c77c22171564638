"""Bytes that a plan takes of every rank, kind by kind. Pure."""

from collections.abc import Mapping

import numpy as np
import torch

from ds_kfac.assignment.work import Work, kept_bytes, packed_bytes
from ds_kfac.comm.reducer import IN_FLIGHT
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.estimate.traffic import PlannedTraffic, message_bytes

STATE = ("factors", "history", "eigenbases", "moments")
"""What is kept between steps; with the inverse method, inverses are counted as eigenbases."""
TRANSIENT = ("sums", "messages")
"""What a step that captures and refreshes everything needs in addition, while it lasts: sums that are made or averaged
here, and the messages that are on their way at a time."""
COUNTER, NORMS = 4, 8
"""Bytes of the counter of a layer's moments."""


def memory_of(traffic: PlannedTraffic, config: KFACConfig, *, moments: int) -> Mapping[str, np.ndarray]:
    """Kind -> bytes [W], once everything is there.

    Args:
        moments: fp32 tensors of a layer's shape that its workers keep.
    """
    plan = traffic.plan
    assignment, world = plan.assignment, plan.assignment.world
    memory = {kind: np.zeros(world, dtype=np.int64) for kind in (*STATE, *TRANSIENT)}
    for factor in assignment.factors:
        home = assignment.decomposers[factor.key]
        memory["factors"][home] += packed_bytes(factor.side)
        # the last value is the factor itself
        memory["history"][home] += 4 * factor.side.numel + NORMS if plan.adaptive else 0
        users = Work.users(factor, assignment.workers)
        memory["eigenbases"][sorted(users)] += kept_bytes(factor.side, plan.method)
        rounded = plan.wire is not torch.float32 and bool(traffic.delivery.receivers[factor.key])
        if plan.exact_every > 1 and (home not in users or rounded):  # the exact one, to start from
            memory["eigenbases"][home] += kept_bytes(factor.side, plan.method)
    for layer in plan.layers:
        workers = list(assignment.workers[layer.name])
        for side in (layer.A, layer.G):
            # the ones of an identity
            memory["eigenbases"][workers] += kept_bytes(side, plan.method) if side.block == 0 else 0
        memory["moments"][workers] += (4 * moments * layer.numel + COUNTER) if moments else 0

    for slot in traffic.layout.slots(traffic.every, 0):
        memory["sums"][list({slot.owner, *slot.contributors})] += 4 * slot.numel
    if world > 1:
        exchanged = (traffic.gather(traffic.every, traffic.every), traffic.scatter)
        reductions = [message_bytes([message]) for message in traffic.reductions(traffic.every)]
        held = [np.zeros(world, dtype=np.int64) + message_bytes([message]) for message in exchanged]
        for start in range(len(reductions)):
            held.append(np.sum(reductions[start : start + IN_FLIGHT], axis=0))
        memory["messages"] += np.max(held, axis=0)
    return memory


def state_bytes(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bytes [W] between steps."""
    return np.sum([memory[kind] for kind in STATE], axis=0)


def transient_bytes(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bytes [W] in addition to them in a step that captures and refreshes everything: the first one, if not every."""
    return np.sum([memory[kind] for kind in TRANSIENT], axis=0)
