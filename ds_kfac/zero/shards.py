"""Plans for moving gradients. A plan knows which rank holds which elements, which layer the
elements belong to, and which elements are sent to the layer's gradient workers (the ranks that
precondition the layer) and back. Making plans needs no communication, and every rank makes the same
plans. ``comm/message.py`` executes them.

    part    one of several equal parts of a flattened parameter. A stack of experts that is one
            parameter has a part for each expert; a large head may be cut into parts
            (``model/blocks.py``). Most parameters have a single part, the whole parameter.
    shard   a contiguous piece of a part, or of a parameter, that a rank holds in one place
    span    (start, number of elements) in a flattened part or parameter
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from torch import Tensor

from ds_kfac.comm.message import Move, RelayoutPlan
from ds_kfac.model.layers import LayerSpec

FLAT_ALIGNMENT = 2
"""ZeRO-1/2 pads a group's flat buffer so that each rank's slice has a multiple of this many
elements."""


@dataclass(frozen=True, order=True)
class Shard:
    """Elements start .. start + numel - 1 of the gradient of a flattened parameter, or of a part of
    a parameter, all held by ``rank``.

    Attributes:
        param: index of the parameter or part in :attr:`ShardMap.numels`.
        group: index of DeepSpeed's parameter group or sub-group that stores the shard.
        offset: index of the shard's first element in that group's storage on ``rank``.
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
        """Return (index of the part's first element, number of elements) if the parameter has
        ``numel`` elements."""
        return self.index * (numel // self.count), numel // self.count


@dataclass(frozen=True)
class ShardMap:
    """All shards of the preconditioned parameters, or of the parts of these parameters.

    Each element is on exactly one rank if gradients are partitioned, and on all ranks if they are
    replicated.

    Attributes:
        numels: number of elements of each parameter or part.
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
        """The shards of each parameter or part, on all ranks."""
        shards: list[list[Shard]] = [[] for _ in self.numels]
        for shard in self.shards:
            shards[shard.param].append(shard)
        order = attrgetter("start", "numel", "rank", "group", "offset")
        return tuple(tuple(sorted(of_one, key=order)) for of_one in shards)

    def held(self, params: Sequence[int]) -> tuple[int, ...]:
        """Return, for each rank, how many elements it holds of the parameters or parts with the
        indices ``params``."""
        held = [0] * self.world
        for param in params:
            for shard in self.of_param[param]:
                held[shard.rank] += shard.numel
        return tuple(held)

    def on(self, rank: int) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def cut(self, parts: Sequence[ParameterPart]) -> "ShardMap":
        """Return the map of the shards of ``parts``. In this map ``Shard.param`` is an index in
        ``parts``. A shard that covers several parts is cut into several shards."""
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


def gapless_starts(params: Iterable[Tensor]) -> list[int]:
    """Return the index of each tensor's first element in a flat buffer in which the tensors follow
    each other without gaps."""
    return list(accumulate((param.numel() for param in params), initial=0))[:-1]


def partition_flat(
    numel: int, param: int, group: int, offset: int, size: int, world: int
) -> list[Shard]:
    """Return the shards of a parameter in a flat buffer (ZeRO-1/2). The parameter begins at element
    ``offset`` of the buffer, and each rank holds ``size`` consecutive elements of the buffer."""
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
    """Return the shards of a parameter that is cut into ``world`` equal chunks (ZeRO-3). The last
    chunks may contain padding, which belongs to no shard."""
    chunk = -(-numel // world)
    return [
        Shard(param, rank * chunk, min(chunk, numel - rank * chunk), rank, group, offset)
        for rank in range(world)
        if rank * chunk < numel
    ]


def parameter_names(layers: Sequence[LayerSpec]) -> list[str]:
    """Return the names of the layers' parameters. A parameter of several layers is listed once."""
    return list(dict.fromkeys(name for layer in layers for name in layer.parameters))


def parts_of(layers: Sequence[LayerSpec]) -> tuple[ParameterPart, ...]:
    """Return the parts of each layer's parameters, in the order of the layers. The parameters
    are numbered as in :func:`parameter_names`."""
    place = {name: index for index, name in enumerate(parameter_names(layers))}
    return tuple(
        ParameterPart(place[name], *layer.part) for layer in layers for name in layer.parameters
    )


def of_layers(layers: Sequence[LayerSpec]) -> Mapping[str, tuple[int, ...]]:
    """Return a dict from layer name to the indices of the layer's parts in the result of
    :func:`parts_of`."""
    indices: dict[str, tuple[int, ...]] = {}
    start = 0
    for layer in layers:
        indices[layer.name] = tuple(range(start, start + len(layer.parameters)))
        start += len(layer.parameters)
    return indices


def held_by_layer(layers: Sequence[LayerSpec], shards: ShardMap) -> Mapping[str, tuple[int, ...]]:
    """Return a dict from layer name to the number of elements that each rank holds of the layer's
    gradient. ``shards`` is the map of the parts that :func:`parts_of` returns."""
    return {name: shards.held(params) for name, params in of_layers(layers).items()}


def plan_gather(shards: ShardMap, workers: Mapping[int, Sequence[int]]) -> RelayoutPlan:
    """Return the moves of partitioned gradients to their gradient workers. The gradient of each
    parameter or part moves to the first of its workers.

    Args:
        workers: ``Shard.param`` -> ranks of the gradient workers.
    """
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
    """Return the moves of results from gradient workers to all ranks that hold the shards. For
    partitioned gradients these are the moves of :func:`plan_gather` in the opposite direction."""
    moves = []
    for shard in shards.shards:
        worker = worker_that_sends_to(workers[shard.param], shard.rank, shards.world)
        if worker != shard.rank:
            moves.append(Move(shard.param, shard.start, shard.numel, worker, shard.rank))
    return RelayoutPlan(shards.world, tuple(moves))


def worker_that_sends_to(workers: Sequence[int], rank: int, world: int) -> int:
    """Return the gradient worker from which ``rank`` receives a result. All ranks are divided into
    groups of consecutive ranks, with one worker in each group. The result is the worker in the
    group of ``rank``, which may be ``rank`` itself."""
    return workers[rank // (world // len(workers))]


def planned_shards(
    layers: Sequence[LayerSpec],
    groups: Sequence[Sequence[tuple[str, int]]],
    *,
    world: int,
    stage: int,
    round_robin: bool = False,
) -> ShardMap:
    """Predict, without an engine, where DeepSpeed will put the layers' gradients.

    Args:
        groups: for each of the optimizer's parameter groups, (name, number of elements) pairs of
            its trained parameters, in the optimizer's order.
        stage: ZeRO stage; 0 if every rank has every averaged gradient. At stage 3, ``Shard.group``
            and ``Shard.offset`` depend on ZeRO's sub-groups and are set to 0.
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
