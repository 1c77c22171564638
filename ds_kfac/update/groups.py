"""Which layers are stepped together, in which order, and what they keep: layers of one shape in one tensor each."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, Precision
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.rotation import Rotation, in_memory
from ds_kfac.update.state import LayerState

S = TypeVar("S", bound=Any)

STACKED_BYTES = 1 << 28
"""Of eigenvectors that lie together on a rank, and beside those that they replace in a step that refreshes them."""


def stacks(
    layers: Sequence[LayerSpec],
    *,
    alike: Callable[[LayerSpec], Hashable] | None,
    largest: int | None = None,
    limit: int = STACKED_BYTES,
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Every layer once, alone or with others of equal shape. Pure.

    Args:
        alike: only layers with the same are put together; None: every layer alone.
        largest: elements of the layers of one; None: :data:`ds_kfac.update.rotation.STACKED`.
        limit: bytes of eigenvectors that lie together; the smallest shapes first, as they gain most.
    """
    if alike is None:
        return tuple((layer,) for layer in layers)
    together: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        sides = (layer.G, layer.A)
        whole = layer.groups == 1 and all(side.block in (0, 1, side.dim) for side in sides)
        key = (layer.G, layer.A, alike(layer)) if whole else layer.name
        together.setdefault(key, []).append(layer)
    found: list[tuple[LayerSpec, ...]] = []
    for group in sorted(together.values(), key=lambda group: stacked_bytes(group[:1])):
        room, most = limit // max(1, stacked_bytes(group[:1])), (largest or in_memory(stacked=True)) // group[0].numel
        fit = group[:room] if min(room, most, len(group)) > 1 else []
        limit -= stacked_bytes(fit)
        count = -(-len(fit) // max(1, most))
        found += [tuple(fit[index::count]) for index in range(count)]
        found += [(layer,) for layer in group[len(fit) :]]
    place = {layer.name: index for index, layer in enumerate(layers)}
    return tuple(sorted(found, key=lambda group: place[group[0].name]))


def stacked_bytes(layers: Sequence[LayerSpec]) -> int:
    """Of their eigenvectors and eigenvalues, fp32."""
    return 4 * sum(side.dim + side.basis_numel for layer in layers for side in (layer.G, layer.A))


def batches(stacks: Sequence[tuple[LayerSpec, ...]], states: Mapping[str, Any]) -> Iterator[tuple[LayerSpec, ...]]:
    """The stacks, for a step: one that lacks an eigenbasis somewhere layer by layer."""
    for layers in stacks:
        if len(layers) == 1 or all(states[layer.name].basis is not None for layer in layers):
            yield layers
        else:
            yield from ((layer,) for layer in layers)


def rounds(
    stacks: Iterable[S], layers: Callable[[S], Sequence[LayerSpec]] = lambda stack: stack, *, limit: int
) -> list[list[S]]:
    """What of a step is in memory at a time: stacks of ``limit`` elements, or one that has more, as :func:`in_order`.

    Args:
        layers: of a stack.
    """
    found: list[list[S]] = []
    room = 0
    for stack in in_order(stacks, layers):
        numel = sum(layer.numel for layer in layers(stack))
        if numel > room:
            found.append([])
            room = max(limit, numel)
        found[-1].append(stack)
        room -= numel
    return found


def in_order(stacks: Iterable[S], layers: Callable[[S], Sequence[LayerSpec]] = lambda stack: stack) -> tuple[S, ...]:
    """The largest matrices first, when no results wait yet; those with the same sides, as they are or transposed, next
    to each other. Pure."""

    def size(stack: S) -> tuple[int, ...]:
        sides = layers(stack)[0].shape[-2:]
        return math.prod(sides), *sorted(sides)

    return tuple(sorted(stacks, key=size, reverse=True))


class Group:
    """Layers of one shape that are stepped together: what they keep lies in one tensor each, [n, ..], of which a
    layer's state is a slice. A layer alone is a group of one, whose matrix stays [O, I] and whose state stays as it is:
    a batch of one is slower than none.

    Attributes:
        layers, names: the layers.
        rotation: into their eigenbases; None until all have one, and with a method that has none.
        moments: of all, each [n, ..]; of one layer its own.
    """

    def __init__(self, layers: Sequence[LayerSpec], precision: Precision = HIGHEST) -> None:
        self.layers, self.names, self.precision = tuple(layers), tuple(layer.name for layer in layers), precision
        self.rotation: Rotation | None = None
        self.moments: Any = None
        self._sides: tuple[Eigenbasis, ...] = ()
        self._slices: list[Any] = []

    def take(self, states: dict[str, LayerState]) -> list[LayerState]:
        """The layers' states, which what the group keeps follows: slices of it take the place of what is none, after a
        refresh eigenbases, after a load moments too. Then there is nothing twice, once the step was applied."""
        own = [states[name] for name in self.names]
        moments = [state.moments for state in own]
        if len(own) == 1:
            self.moments = moments[0]
        elif moments[0] is not None and [*map(id, moments)] != [*map(id, self._slices)]:
            self.moments, self._slices = None, []  # their memory first
            kept = zip(*(vars(one).values() for one in moments), strict=True)
            own = self.keep(states, type(moments[0])(*(torch.stack(parts) for parts in kept)))
        bases = [basis for state in own if (basis := state.basis)]
        sides = tuple(side for basis in bases for side in (basis.G, basis.A))
        if len(bases) < len(own):
            self.rotation, self._sides = None, ()
        elif [*map(id, sides)] != [*map(id, self._sides)]:
            self.rotation, self._sides = None, ()
            self.rotation = turn = Rotation.of(bases, self.precision)
            if len(own) > 1:
                halves = ((turn.G, turn.values_G), (turn.A, turn.values_A))
                pairs = [[_slice(*half, index) for half in halves] for index in range(len(own))]
                own = [replace(state, G=G, A=A) for state, (G, A) in zip(own, pairs, strict=True)]
                sides = tuple(side for pair in pairs for side in pair)
                states.update(zip(self.names, own, strict=True))
            self._sides = sides
        return own

    def keep(self, states: dict[str, LayerState], moments: Any) -> list[LayerState]:
        """States with these moments of all layers, in their place."""
        self.moments = moments
        if len(self.names) == 1:
            self._slices = [moments]
        else:
            kept = zip(*(part.unbind() for part in vars(moments).values()), strict=True)
            self._slices = [type(moments)(*parts) for parts in kept]
        own = [replace(states[name], moments=one) for name, one in zip(self.names, self._slices, strict=True)]
        states.update(zip(self.names, own, strict=True))
        return own

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """[n, ..] of one of each layer; of one layer itself."""
        return parts[0] if len(parts) == 1 else torch.stack(list(parts))

    def apart(self, x: Tensor) -> Sequence[Tensor]:
        """Inverse of :meth:`together`; views."""
        return [x] if len(self.names) == 1 else x.unbind()

    def any(self, flags: Tensor) -> Tensor:
        """Bool [n], of one layer a scalar: whether it is so of any of a layer's maps, of one in groups."""
        return flags if len(self.names) > 1 else flags.any()


def _slice(vectors: Sequence[Tensor], values: Tensor, index: int) -> Eigenbasis:
    return Eigenbasis(tuple(part[index : index + 1] for part in vectors), values[index])


class Groups:
    """Those of a run, as its stacks are for a step: one that lacks an eigenbasis somewhere is taken layer by layer."""

    def __init__(self, stacks: Sequence[tuple[LayerSpec, ...]], precision: Precision) -> None:
        self.stacks, self.precision = stacks, precision
        self.kept: dict[tuple[str, ...], Group] = {}

    def of(self, states: Mapping[str, LayerState]) -> Iterable[Group]:
        """In the order of the stacks. What was in another group is forgotten there."""
        old, self.kept = self.kept, {}
        for layers in batches(self.stacks, states):
            names = tuple(layer.name for layer in layers)
            self.kept[names] = old.get(names) or Group(layers, self.precision)
        return self.kept.values()
