"""Plans of gradients: which rank holds which elements, which layer they belong to, and what moves
to the layer's worker and back. Pure, the same on every rank; ``comm/message.py`` executes them.

    part    one of a number of equal parts of a flattened parameter: one expert's of a stack that is
            one parameter, or one of a large head that is cut (``model/blocks.py``). Most
            parameters have one part, all of it.
    shard   what a rank holds of a part, or of a parameter, in one place
    span    (start, number of elements) in a flattened part or parameter
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from ds_kfac.comm.message import Move, RelayoutPlan
from ds_kfac.model.layers import LayerSpec

FLAT_ALIGNMENT = 2
"""ZeRO-1/2 pads a group's flat buffer to a multiple of this many elements a rank."""


@dataclass(frozen=True, order=True)
class Shard:
    """Elements start .. start + numel of the gradient of a flattened parameter, or of a part of
    one, held by ``rank``.

    Attributes:
        param: index of the parameter or part in :attr:`ShardMap.numels`.
        group: DeepSpeed's parameter group or sub-group that stores it.
        offset: its first element in that group's storage on ``rank``.
    """

    param: int
    start: int
    numel: int
    rank: int
    group: int
    offset: int


@dataclass(frozen=True)
class ParameterPart:
    """Part number ``index`` of ``count`` equal parts of a flattened parameter."""

    param: int
    index: int = 0
    count: int = 1

    def span(self, numel: int) -> tuple[int, int]:
        """Return (first element, number of elements) in a parameter of ``numel`` elements."""
        return self.index * (numel // self.count), numel // self.count


@dataclass(frozen=True)
class ShardMap:
    """All shards of the preconditioned parameters, or of parts of them.

    Attributes:
        numels: number of elements of each parameter or part.

    Each element is on exactly one rank if gradients are partitioned, on all if
    they are replicated.
    """

    world: int
    numels: tuple[int, ...]
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        for param, numel in enumerate(self.numels):
            end = 0
            for start, stop in sorted({(s.start, s.start + s.numel) for s in self.of_param[param]}):
                if start != end:
                    raise ValueError(
                        f"shard map: parameter {param} has a gap or overlap at element "
                        f"{min(start, end)}"
                    )
                end = stop
            if end != numel:
                raise ValueError(
                    f"shard map: the shards of parameter {param} cover only its first {end} of "
                    f"{numel} elements"
                )

    @cached_property
    def of_param(self) -> tuple[tuple[Shard, ...], ...]:
        """The shards of each parameter."""
        shards: list[list[Shard]] = [[] for _ in self.numels]
        for shard in self.shards:
            shards[shard.param].append(shard)
        order = attrgetter("start", "numel", "rank", "group", "offset")
        return tuple(tuple(sorted(of_one, key=order)) for of_one in shards)

    def held(self, params: Sequence[int]) -> tuple[int, ...]:
        """Elements of ``params`` on each rank."""
        held = [0] * self.world
        for param in params:
            for shard in self.of_param[param]:
                held[shard.rank] += shard.numel
        return tuple(held)

    def on(self, rank: int) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def cut(self, parts: Sequence[ParameterPart]) -> "ShardMap":
        """Return the map of some parts, in which ``Shard.param`` is a part's number. A shard of
        several parts is cut."""
        shards: list[Shard] = []
        numels = []
        for number, part in enumerate(parts):
            first, numel = part.span(self.numels[part.param])
            numels.append(numel)
            for shard in self.of_param[part.param]:
                start = max(first, shard.start)
                stop = min(first + numel, shard.start + shard.numel)
                if start < stop:
                    offset = shard.offset + start - shard.start
                    shards.append(
                        Shard(number, start - first, stop - start, shard.rank, shard.group, offset)
                    )
        return ShardMap(self.world, tuple(numels), tuple(shards))


def partition_flat(
    numel: int, param: int, group: int, offset: int, size: int, world: int
) -> list[Shard]:
    """Shards of one parameter that begins at ``offset`` in a flat buffer with ``size`` elements a
    rank (ZeRO-1/2)."""
    shards: list[Shard] = []
    for rank in range(world):
        start = max(offset, rank * size)
        stop = min(offset + numel, (rank + 1) * size)
        if start < stop:
            shards.append(
                Shard(param, start - offset, stop - start, rank, group, start - rank * size)
            )
    return shards


def partition_chunks(numel: int, param: int, group: int, offset: int, world: int) -> list[Shard]:
    """Shards of one parameter in ``world`` equal chunks, the last ones padded (ZeRO-3)."""
    chunk = -(-numel // world)
    return [
        Shard(param, rank * chunk, min(chunk, numel - rank * chunk), rank, group, offset)
        for rank in range(world)
        if rank * chunk < numel
    ]


def parameter_names(layers: Sequence[LayerSpec]) -> list[str]:
    """Names of the preconditioned parameters, each once."""
    return list(dict.fromkeys(name for layer in layers for name in layer.parameters))


def parts_of(layers: Sequence[LayerSpec]) -> tuple[ParameterPart, ...]:
    """The layers' parts of the parameters in :func:`parameter_names`, layer after layer."""
    place = {name: index for index, name in enumerate(parameter_names(layers))}
    return tuple(
        ParameterPart(place[name], *layer.part) for layer in layers for name in layer.parameters
    )


def of_layers(layers: Sequence[LayerSpec]) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> indices of its parts in :func:`parts_of`."""
    indices: dict[str, tuple[int, ...]] = {}
    start = 0
    for layer in layers:
        indices[layer.name] = tuple(range(start, start + len(layer.parameters)))
        start += len(layer.parameters)
    return indices


def held_by_layer(layers: Sequence[LayerSpec], shards: ShardMap) -> Mapping[str, tuple[int, ...]]:
    """Layer name -> number of its gradient's elements on each rank. ``shards``: of
    :func:`parts_of`."""
    return {name: shards.held(params) for name, params in of_layers(layers).items()}


def plan_gather(shards: ShardMap, workers: Mapping[int, Sequence[int]]) -> RelayoutPlan:
    """Moves that bring partitioned gradients to their workers, one each. ``workers``:
    ``Shard.param`` -> ranks."""
    in_place = {
        (shard.param, shard.start)
        for shard in shards.shards
        if shard.rank == workers[shard.param][0]
    }
    moves = [
        Move(shard.param, shard.start, shard.numel, shard.rank, workers[shard.param][0])
        for shard in shards.shards
        if (shard.param, shard.start) not in in_place
    ]
    return RelayoutPlan(shards.world, tuple(moves))


def plan_scatter(shards: ShardMap, workers: Mapping[int, Sequence[int]]) -> RelayoutPlan:
    """Moves that bring results to every rank that holds a shard: for partitioned gradients the
    gather's inverse."""
    moves = []
    for shard in shards.shards:
        worker = worker_that_sends_to(workers[shard.param], shard.rank, shards.world)
        if worker != shard.rank:
            moves.append(Move(shard.param, shard.start, shard.numel, worker, shard.rank))
    return RelayoutPlan(shards.world, tuple(moves))


def worker_that_sends_to(workers: Sequence[int], rank: int, world: int) -> int:
    """Return the worker from which a rank gets a result: the one in its group of consecutive
    ranks, maybe itself."""
    return workers[rank // (world // len(workers))]


def planned_shards(
    layers: Sequence[LayerSpec],
    groups: Sequence[Sequence[tuple[str, int]]],
    *,
    world: int,
    stage: int,
    round_robin: bool = False,
) -> ShardMap:
    """Where DeepSpeed will put the layers' gradients, predicted without an engine.

    Args:
        groups: the optimizer's parameter groups: (name, elements) of trained parameters, in its
            order.
        stage: ZeRO's; 0 if every rank has every averaged gradient. At stage 3 ``Shard.group`` and
            ``offset``, which depend on its sub-groups, are 0.
        round_robin: ``round_robin_gradients`` of ZeRO-1/2.
    """
    place = {name: index for index, name in enumerate(parameter_names(layers))}
    numels = dict(entry for group in groups for entry in group)
    shards: list[Shard] = []
    for index, group in enumerate(groups):
        params = [(place[name], numel) for name, numel in group if name in place]
        if stage == 0:
            shards += [
                Shard(param, 0, numel, rank, index, 0)
                for param, numel in params
                for rank in range(world)
            ]
        elif stage == 3:
            shards += [
                shard
                for param, numel in params
                for shard in partition_chunks(numel, param, 0, 0, world)
            ]
        else:
            step = world if round_robin else 1
            order = [entry for first in range(step) for entry in group[first::step]]
            *offsets, total = accumulate((numel for _, numel in order), initial=0)
            size = -(-total // (FLAT_ALIGNMENT * world)) * FLAT_ALIGNMENT
            for (name, numel), offset in zip(order, offsets, strict=True):
                if name in place:
                    shards += partition_flat(numel, place[name], index, offset, size, world)
    return ShardMap(world, tuple(numels[name] for name in place), tuple(shards)).cut(
        parts_of(layers)
    )
