"""Who: the rank that owns each layer's factors, eigenbases and preconditioning. Pure; the same on every rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac.layers.base import LayerSpec

NEAR_TIE = 0.99
"""Ranks holding at least this part of what the majority holder holds count as equals (ZeRO-3 chunks, replicas)."""


@dataclass(frozen=True)
class Assignment:
    """Layer name -> owner, and the modelled load of each rank."""

    owners: Mapping[str, int]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def layer_cost(layer: LayerSpec, refresh_interval: int) -> float:
    """FLOPs per step on the owner: four GEMMs every step, the decompositions (9 n^3 a block) every refresh."""
    i, o = layer.dim_A, layer.dim_G
    rotations = 4.0 * i * o * sum(side.block for side in (layer.A, layer.G) if side.block > 1)
    decompositions = 9.0 * sum(count * width**3 for side in (layer.A, layer.G) for count, width in side.groups)
    return rotations + decompositions / refresh_interval + i * o


def assign_owners(
    layers: Sequence[LayerSpec],
    held: Mapping[str, Sequence[int]],
    *,
    world: int,
    refresh_interval: int,
    load_tolerance: float,
) -> Assignment:
    """Own a layer where most of its gradient already is, unless that overloads the rank.

    Heaviest layers first. The majority holder takes a layer if its load stays within ``1 + load_tolerance`` of the
    mean; otherwise the least loaded rank does. Near-equal holders compete by load, so a replicated gradient gives
    plain longest-processing-time scheduling. At the end a rank without a layer takes one from the
    fullest rank that has two.

    Args:
        held: per layer name, gradient elements each rank holds (len ``world``).
        load_tolerance: accepted excess over the mean load, e.g. 0.1.
    """
    costs = {layer.name: layer_cost(layer, refresh_interval) for layer in layers}
    limit = (1 + load_tolerance) * sum(costs.values()) / world
    loads = [0.0] * world
    owners: dict[str, int] = {}
    for layer in sorted(layers, key=lambda layer: -costs[layer.name]):  # stable: module order among equals
        most = max(held[layer.name])
        holders = [rank for rank in range(world) if held[layer.name][rank] >= NEAR_TIE * most]
        owner = min(holders, key=lambda rank: loads[rank])
        if loads[owner] + costs[layer.name] > limit:
            owner = min(range(world), key=lambda rank: loads[rank])
        owners[layer.name] = owner
        loads[owner] += costs[layer.name]
    _employ_idle_ranks(owners, loads, costs)
    return Assignment({layer.name: owners[layer.name] for layer in layers}, tuple(loads))


def _employ_idle_ranks(owners: dict[str, int], loads: list[float], costs: Mapping[str, float]) -> None:
    for idle in (rank for rank, load in enumerate(loads) if load == 0):
        counts = Counter(owners.values())
        donors = [rank for rank in range(len(loads)) if counts[rank] >= 2]
        if not donors:
            return
        donor = max(donors, key=lambda rank: loads[rank])
        name = min((name for name, owner in owners.items() if owner == donor), key=lambda name: costs[name])
        owners[name] = idle
        loads[donor] -= costs[name]
        loads[idle] += costs[name]
