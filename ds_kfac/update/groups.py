"""Layers of one shape that are stepped in one batch, as the launches of a layer cost more than its products: which
layers are together, in which order, and the tensors that they share.

Shape suffixes: O, I the sides of a layer's matrix; nOI stands for [n, O, I], the matrices of all layers of a group.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis, Precision
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.rotation import Rotation, chunk_budget, repeated
from ds_kfac.update.state import LayerState

S = TypeVar("S", bound=Any)

BATCHED_BYTES = 1 << 28
"""Of eigenvectors of batched layers on a rank, and beside those that they replace in a step that refreshes them."""


def group_by_shape(
    layers: Sequence[LayerSpec], *, key: Callable[[LayerSpec], Hashable] | None
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Groups that have every layer once, alone or with others of equal shape: as many as :data:`BATCHED_BYTES` hold,
    the smallest shapes first, as they gain most. Pure.

    Args:
        key: layers may be together if their keys are equal; None: every layer alone.
    """
    if key is None:
        return tuple((layer,) for layer in layers)
    of_shape: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        sides = (layer.G, layer.A)
        whole = layer.groups == 1 and all(side.block in (0, 1, side.dim) for side in sides)
        of_shape.setdefault((layer.G, layer.A, key(layer)) if whole else layer.name, []).append(layer)
    groups, left = list[tuple[LayerSpec, ...]](), BATCHED_BYTES
    for alike in sorted(of_shape.values(), key=lambda alike: basis_bytes(alike[:1])):
        numel = alike[0].numel
        room, most = left // max(1, basis_bytes(alike[:1])), chunk_budget(batched=True, numel=numel) // numel
        batched = alike[:room] if min(room, most, len(alike)) > 1 else []
        left -= basis_bytes(batched)
        count = -(-len(batched) // max(1, most))
        groups += [tuple(batched[index::count]) for index in range(count)]
        groups += [(layer,) for layer in alike[len(batched) :]]
    place = {layer.name: index for index, layer in enumerate(layers)}
    return tuple(sorted(groups, key=lambda group: place[group[0].name]))


def basis_bytes(layers: Sequence[LayerSpec]) -> int:
    """Of their eigenvectors and eigenvalues, fp32."""
    return 4 * sum(side.dim + side.basis_numel for layer in layers for side in (layer.G, layer.A))


def chunks(groups: Iterable[Sequence[LayerSpec]], *, batched: bool) -> list[list[Sequence[LayerSpec]]]:
    """Which groups' directions are in memory at a time: as many elements together as :func:`chunk_budget` has for the
    largest layer, or one group that has more; in the order of :func:`in_order`. Pure."""
    found: list[list[Sequence[LayerSpec]]] = []
    room = 0
    for group in in_order(groups):
        numel = sum(layer.numel for layer in group)
        if numel > room:
            found.append([])
            room = max(chunk_budget(batched=batched, numel=group[0].numel), numel)
        found[-1].append(group)
        room -= numel
    return found


def in_order(groups: Iterable[S]) -> tuple[S, ...]:
    """The largest matrices first, when no results wait yet; those with the same sides, as they are or transposed, next
    to each other. Pure."""

    def size(group: Sequence[LayerSpec]) -> tuple[int, ...]:
        sides = group[0].shape[-2:]
        return math.prod(sides), *sorted(sides)

    return tuple(sorted(groups, key=size, reverse=True))


class LayerGroup:
    """Layers of one shape and what they keep: one tensor of each kind for all of them, of which a layer's state has a
    slice. A layer that is alone is a group, too, whose tensors are views of the layer's own.

    Attributes:
        layers, names: the layers.
        maps: matrices of a layer, n in all: the groups of a grouped convolution, else 1.
        rotation: into the eigenbases of this step. None until a layer has one, and with a method that has none; a
            layer that has none yet, beside others that have, is rotated by the identity.
        stays: whether eigenbases of applied steps must stay in their places, where a recorded step reads them.
        moments: of all matrices, [n, ..]; None if the update rule keeps none.
    """

    def __init__(self, layers: Sequence[LayerSpec], precision: Precision = HIGHEST) -> None:
        self.layers, self.names, self.precision = tuple(layers), tuple(layer.name for layer in layers), precision
        self.maps, self.n = layers[0].groups, len(layers) * layers[0].groups
        self.stays = False
        self.forget()

    def forget(self) -> None:
        """Take everything from the layers' states again, at the next :meth:`load`."""
        self.rotation: Rotation | None = None
        self._home: Rotation | None = None  # its tensors have the eigenbases of applied steps
        self.moments: Any = None
        self._sides: tuple[Eigenbasis, ...] = ()  # of the layers that have a basis, whose indices are _based
        self._based: tuple[int, ...] = ()
        self._slices: list[Any] = []

    @property
    def at_home(self) -> bool:
        """Whether :attr:`rotation` reads the eigenbases of applied steps, not fresh ones beside them."""
        return self.rotation is self._home

    def load(self, states: dict[str, LayerState], *, fresh: Collection[str]) -> None:
        """Take in the layers' states of this step. What others have put there since the last call, after a refresh
        eigenbases, after a checkpoint was loaded moments too, is copied to the group's tensors, and slices of these
        take its place in ``states``: nothing is in memory twice, once the step was applied.

        Args:
            fresh: layers with eigenbases that came in this step: if it is skipped they go, so that the old ones must
                not be overwritten.
        """
        moments = [states[name].moments for name in self.names]
        if moments[0] is not None and [*map(id, moments)] != [*map(id, self._slices)]:
            self.moments, self._slices = None, []  # their memory first
            kind, shape, n = type(moments[0]), self.layers[0].shape, len(self.layers)
            parts = zip(*(vars(of_layer).values() for of_layer in moments), strict=True)
            self.moments = kind(*(self.matrices(part) for part in parts))
            views = (x.view(n, *(shape if x.ndim > 1 else shape[:-2])).unbind() for x in vars(self.moments).values())
            self._slices = [kind(*slices) for slices in zip(*views, strict=True)]
            for name, old, new in zip(self.names, moments, self._slices, strict=True):
                states[name] = replace(states[name], moments=new)
                for part, same in zip(vars(old).values(), vars(new).values(), strict=True):
                    part.set_(same)  # equal: who has the old ones frees their memory
        bases = [states[name].basis for name in self.names]
        sides = tuple(side for basis in bases if basis for side in (basis.G, basis.A))
        based = tuple(index for index, basis in enumerate(bases) if basis)
        self.rotation = self._home
        if [*map(id, sides)] == [*map(id, self._sides)]:
            return
        if self._home is not None and based == self._based and same_form(self._sides, sides):
            if not any(name in fresh for name in self.names):
                self._replace_bases(self._home, states)
                return
            if self.stays:
                self.rotation = self._rotation(bases)
                return
        self.rotation = self._home = None  # its memory first
        self._sides, self._based = (), based
        if sides:
            self._load_bases(states, bases)

    def _replace_bases(self, rotation: Rotation, states: dict[str, LayerState]) -> None:
        """New eigenbases where the old ones of the same layers were: who reads them by their places goes on."""
        old, new = list[Tensor](), list[Tensor]()
        for place, index in enumerate(self._based):
            state, (G, A) = states[self.names[index]], self._sides[2 * place : 2 * place + 2]
            for before, now in ((G, state.G), (A, state.A)):
                if isinstance(now, Eigenbasis) and now is not before:
                    old += [*before.vectors, before.values]
                    new += [*now.vectors, now.values]
            states[self.names[index]] = replace(state, G=G, A=A)
        torch._foreach_copy_(old, new)
        rotation.follow()

    def _load_bases(self, states: dict[str, LayerState], bases: Sequence[LayerBasis | None]) -> None:
        self.rotation = self._home = rotation = self._rotation(bases)
        if len(bases) > 1:
            halves = ((rotation.G, rotation.values_G), (rotation.A, rotation.values_A))
            for index, name in enumerate(self.names):
                if bases[index]:
                    G, A = (Eigenbasis(tuple(v[index : index + 1] for v in vectors), values[index])
                            for vectors, values in halves)  # fmt: skip
                    states[name] = replace(states[name], G=G, A=A)
        ready = [basis for name in self.names if (basis := states[name].basis)]
        self._sides = tuple(side for basis in ready for side in (basis.G, basis.A))

    def _rotation(self, bases: Sequence[LayerBasis | None]) -> Rotation:
        some = next(basis for basis in bases if basis)
        whole = [basis or LayerBasis(*(_identity_like(side) for side in (some.G, some.A))) for basis in bases]
        return Rotation.of(whole, self.precision, maps=self.maps)

    def matrices(self, parts: Sequence[Tensor]) -> Tensor:
        """[n, ..] of one tensor of each layer, gradients or moments: of several layers a copy, of one layer a view."""
        return parts[0].view(self.n, *parts[0].shape[self.maps > 1 :]) if len(parts) == 1 else torch.stack(list(parts))

    def by_layer(self, x_nOI: Tensor) -> Sequence[Tensor]:
        """Views, each of its layer's shape."""
        return x_nOI.unflatten(0, (-1, self.maps)).unbind() if self.maps > 1 else x_nOI.unbind()

    def flags(self, of_layers: Sequence[bool], device: torch.device) -> Tensor | None:
        """Of each matrix, bool [n]; None if all are true."""
        if all(of_layers):
            return None
        yes, no = (torch.full((), value, dtype=torch.bool, device=device) for value in (True, False))
        return repeated(torch.stack([yes if on else no for on in of_layers]), self.maps)

    def any_map(self, flags_n: Tensor) -> Tensor:
        """Of bool [n] a vector of the layers: whether it is so of any of a layer's matrices."""
        return flags_n if self.maps == 1 else flags_n.view(-1, self.maps).any(dim=1)


def evenly_spaced(parts: Sequence[Tensor]) -> Tensor | None:
    """[n, ..] without a copy: contiguous tensors of one shape that begin at equal distances in one memory, as the
    gradients of equal blocks do at ZeRO-2 and 3. None of others."""
    first, starts = parts[0], [x.storage_offset() for x in parts]
    apart = starts[1] - starts[0] if len(parts) > 1 else first.numel()
    if apart < first.numel() or starts != [starts[0] + index * apart for index in range(len(parts))]:
        return None
    memory = first.untyped_storage().data_ptr()
    for x in parts:
        if not x.is_contiguous() or x.dtype is not first.dtype or x.untyped_storage().data_ptr() != memory:
            return None
    return first.as_strided((len(parts), *first.shape), (apart, *first.stride()), starts[0])


def same_form(old: Sequence[Eigenbasis], new: Sequence[Eigenbasis]) -> bool:
    """Whether each new basis fits into the memory of the old one. A side that had no data since a checkpoint of other
    settings was loaded has no eigenvectors, and gets some."""
    shapes = [[[v.shape for v in basis.vectors] for basis in bases] for bases in (old, new)]
    return shapes[0] == shapes[1]


def _identity_like(side: Eigenbasis) -> Eigenbasis:
    eye = tuple(torch.eye(v.shape[-1], device=v.device, dtype=torch.float32).expand_as(v) for v in side.vectors)
    return Eigenbasis(eye, torch.ones_like(side.values))
