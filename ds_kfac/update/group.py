"""Layers of one shape that are stepped together: what they keep lies in one tensor each, of which a layer's state is a
slice.

A layer alone is a group of one, whose matrix stays [O, I] and whose state stays as it is: a batch of one is slower than
none. Shape suffixes: O, I a layer's sides, n layers of equal shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, Precision
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.rotation import Rotation, batches
from ds_kfac.update.state import LayerState


class Group:
    """
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
        elif moments[0] is not None and moments[0].TOGETHER and not _same(moments, self._slices):
            self.moments, self._slices = None, []  # their memory first
            kept = zip(*(vars(one).values() for one in moments), strict=True)
            own = self.keep(states, type(moments[0])(*(torch.stack(parts) for parts in kept)))
        bases = [basis for state in own if (basis := state.basis)]
        sides = tuple(side for basis in bases for side in (basis.G, basis.A))
        if len(bases) < len(own):
            self.rotation, self._sides = None, ()
        elif not _same(sides, self._sides):
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

    def load(self, values: dict[str, Tensor]) -> Tensor:
        """Of each layer one, taken out of there, as [n, ..]; of one layer itself."""
        return self.together([values.pop(name) for name in self.names])

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


def _same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))


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
