"""Layers to columns of gradient workers: heaviest first, to where the gradient is or to the least loaded."""

from collections import Counter
from collections.abc import Mapping

from ds_kfac.assignment.grid import column
from ds_kfac.assignment.work import Work, kept_bytes, packed_bytes
from ds_kfac.model.layers.base import LayerSpec

LOAD_TOLERANCE = 0.1
"""Part by which a rank's load may pass the mean before a layer leaves the rank that holds its gradient."""
NEAR_TIE = 0.99
"""Ranks holding at least this part of what the majority holder holds count as equals (ZeRO-3 chunks, replicas)."""


def place_workers(
    work: Work, workers: int, *, load_tolerance: float, whole: bool, memory_cap: float | None, by_memory: bool
) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> its workers.

    With ``work.held`` the majority holder takes a layer if its load stays within ``1 + load_tolerance`` of the mean;
    otherwise the least loaded rank does, moving included. Near-equal holders compete by load, and at the end a rank
    without a layer takes one from the fullest rank that has two.

    Args:
        whole: the layer's factors come with it; else only its preconditioning counts, they are placed on their own.
        by_memory: balance bytes in place of seconds.
    """
    grid = _Columns(work, workers, whole)
    limit = (1 + load_tolerance) * sum(grid.weight(layer) for layer in work.layers) / grid.count
    placed: dict[str, int] = {}
    heaviest = sorted(work.layers, key=grid.size if by_memory else grid.weight, reverse=True)  # stable: module order
    for layer in heaviest:
        fits = [
            index
            for index in range(grid.count)
            if memory_cap is None or grid.memory[index] + grid.added_bytes(layer, index) <= memory_cap
        ]
        index = _least(grid, layer, fits or list(range(grid.count)), by_memory or not fits)
        if work.held is not None and not by_memory:
            held = work.held[layer.name]
            most = max(held)
            holders = [index for index in fits if held[index] >= NEAR_TIE * most]
            holder = min(holders, key=lambda index: grid.loads[index], default=None)
            if holder is not None and grid.loads[holder] + grid.added(layer, holder) <= limit:
                index = holder
        grid.add(layer, index)
        placed[layer.name] = index
    if work.held is not None and not by_memory:
        _employ_idle(placed, grid)
    return {name: column(index, world=work.world, workers=workers) for name, index in placed.items()}


def _least(grid: "_Columns", layer: LayerSpec, among: list[int], by_memory: bool) -> int:
    """Where the load, or memory, is least once the layer is there; the first of equals."""
    if by_memory:
        return min(among, key=lambda index: grid.memory[index] + grid.added_bytes(layer, index))
    return min(among, key=lambda index: grid.loads[index] + grid.added(layer, index))


class _Columns:
    """Per-rank load and memory of each grid column during placement, decompositions spread evenly inside it."""

    def __init__(self, work: Work, workers: int, whole: bool) -> None:
        self.work, self.workers, self.whole = work, workers, whole
        self.count = work.world // workers
        self.loads = [0.0] * self.count
        self.memory = [0] * self.count
        self._bases: dict[str, set[int]] = {factor.key: set() for factor in work.factors}

    def weight(self, layer: LayerSpec) -> float:
        """Seconds of a layer wherever it is; those of a shared factor in equal parts."""
        shares = sum(self.work.factor[factor.key] / len(factor.layers) for factor in self.work.used[layer.name])
        return self.work.precondition[layer.name] + (shares / self.workers if self.whole else 0.0)

    def size(self, layer: LayerSpec) -> float:
        """Bytes of a layer, likewise."""
        shares = sum(
            (
                kept_bytes(factor.side, self.work.method)
                + (packed_bytes(factor.side) / self.workers if self.whole else 0)
            )
            / len(factor.layers)
            for factor in self.work.used[layer.name]
        )
        return self.work.worker_bytes(layer) + shares

    def added(self, layer: LayerSpec, index: int) -> float:
        """Seconds that a layer adds to each rank of a column: an eigenbasis that is there already is free."""
        seconds = self.work.precondition[layer.name] + self.work.moved(layer, index)
        for factor in self.work.used[layer.name]:
            bases = self._bases[factor.key]
            if bases and index not in bases:
                seconds += self.work.travel[factor.key]
            elif not bases and self.whole:
                seconds += self.work.factor[factor.key] / self.workers
        return seconds

    def added_bytes(self, layer: LayerSpec, index: int) -> int:
        """The same in bytes."""
        total = self.work.worker_bytes(layer)
        for factor in self.work.used[layer.name]:
            bases = self._bases[factor.key]
            if index not in bases:
                total += kept_bytes(factor.side, self.work.method)
            if not bases and self.whole:
                total += packed_bytes(factor.side) // self.workers
        return total

    def add(self, layer: LayerSpec, index: int) -> None:
        self.loads[index] += self.added(layer, index)
        self.memory[index] += self.added_bytes(layer, index)
        for factor in self.work.used[layer.name]:
            self._bases[factor.key].add(index)


def _employ_idle(placed: dict[str, int], grid: _Columns) -> None:
    weights = {layer.name: grid.weight(layer) for layer in grid.work.layers}
    for idle in (index for index, load in enumerate(grid.loads) if load == 0):
        counts = Counter(placed.values())
        donors = [index for index in range(grid.count) if counts[index] >= 2]
        if not donors:
            return
        donor = max(donors, key=lambda index: grid.loads[index])
        name = min((name for name, index in placed.items() if index == donor), key=lambda name: weights[name])
        placed[name] = idle
        grid.loads[donor] -= weights[name]
        grid.loads[idle] += weights[name]
