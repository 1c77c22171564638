"""Layers of one shape that are stepped in one batch, as the launches of a layer cost more than its
products: which layers are together, in which order, and the tensors that they share.

Shape suffixes: O, I the sides of a layer's matrix; nOI stands for [n, O, I], the matrices of all
layers of a group.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis, Precision
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.methods import EIGEN, Decomposition, Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.rotation import Rotation, chunk_budget, repeated
from ds_kfac.update.state import LayerState, Moments

S = TypeVar("S", bound=Any)

BATCHED_BYTES = 1 << 28
"""Of eigenvectors of batched layers on a rank, and beside those that they replace in a step that
refreshes them."""


def group_by_shape(
    layers: Sequence[LayerSpec], *, key: Callable[[LayerSpec], Hashable] | None
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Groups that have every layer once, alone or with others of equal shape: as many as
    :data:`BATCHED_BYTES` hold, the smallest shapes first, as they gain most. Pure.

    Args:
        key: layers may be together if their keys are equal; None: every layer alone.
    """
    if key is None:
        return tuple((layer,) for layer in layers)
    of_shape: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        sides = (layer.G, layer.A)
        whole = layer.groups == 1 and all(side.block in (0, 1, side.dim) for side in sides)
        of_shape.setdefault((layer.G, layer.A, key(layer)) if whole else layer.name, []).append(
            layer
        )
    groups, left = list[tuple[LayerSpec, ...]](), BATCHED_BYTES
    for alike in sorted(of_shape.values(), key=lambda alike: basis_bytes(alike[:1])):
        numel = alike[0].numel
        room, most = (
            left // max(1, basis_bytes(alike[:1])),
            chunk_budget(batched=True, numel=numel) // numel,
        )
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


def chunks(
    groups: Iterable[Sequence[LayerSpec]], *, batched: bool
) -> list[list[Sequence[LayerSpec]]]:
    """Which groups' directions are in memory at a time: as many elements together as
    :func:`chunk_budget` has for the largest layer, or one group that has more; in the order of
    :func:`in_order`. Pure."""
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
    """The largest matrices first, when no results wait yet; those with the same sides, as they are
    or transposed, next to each other. Pure."""

    def size(group: Sequence[LayerSpec]) -> tuple[int, ...]:
        sides = group[0].shape[-2:]
        return math.prod(sides), *sorted(sides)

    return tuple(sorted(groups, key=size, reverse=True))


class LayerGroup:
    """Layers of one shape, and all that their gradient worker keeps of them.

    The group allocates terms and moments at attach and changes them in place, so that a recorded
    step finds them where they were. Several layers have one stacked tensor of each kind. Their
    eigenvectors are allocated when the first layer gets its basis; new ones are copied there. A
    layer that is alone keeps its decompositions as they came: layers with a common A share it.

    Args:
        moments: kind of the moments; None if the update rule keeps none.

    Attributes:
        layers, names: the layers.
        maps: matrices of a layer, n in all: the groups of a grouped convolution, else 1.
        terms: fp32 [layers], loss terms of the last captured batch, see :class:`LayerState`.
        moments: of all matrices, [n, O, I] and [n]; None if the update rule keeps none.
        rotation: into the eigenbases in use. None until a layer has both sides, and with a method
            that has none. A layer without a basis, beside others that have one, is rotated by the
            identity.
        stays: whether the eigenbases of a layer that is alone must keep their addresses, too,
            because a recorded step reads them. The group then copies them as those of several
            layers. Set it before the first refresh.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        method: Method = EIGEN,
        moments: type[Moments] | None = None,
        precision: Precision = HIGHEST,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.names = tuple(layers), tuple(layer.name for layer in layers)
        self.maps, self.n = layers[0].groups, len(layers) * layers[0].groups
        self.method, self.precision, self.device = method, precision, torch.device(device)
        self.stays = False
        self.terms = torch.ones(len(layers), device=device, dtype=torch.float32)
        self.moments: Any = None
        self._moments_of: list[Any] = [None] * len(layers)
        if moments is not None:
            self.moments = moments.empty((self.n, *layers[0].shape[-2:]), device)
            self._moments_of = self._views(self.moments)
        self.rotation: Rotation | None = None
        self._stacked: Rotation | None = None  # rotation, if it has places for each layer
        self._places: list[LayerBasis] = []  # of each layer in it
        self._sides: list[tuple[Any, Any]] = [(None, None)] * len(layers)  # A and G
        for index in range(len(layers)):
            self._keep(index, *self._at_attach(index))

    def _views(self, moments: Any) -> list[Any]:
        """Those of each layer."""
        count, shape = len(self.layers), self.layers[0].shape
        shapes = [(count, *(shape if x.ndim > 1 else shape[:-2])) for x in vars(moments).values()]
        parts = (
            x.view(shape).unbind() for x, shape in zip(vars(moments).values(), shapes, strict=True)
        )
        return [type(moments)(*of_layer) for of_layer in zip(*parts, strict=True)]

    def _at_attach(self, index: int) -> tuple[Any, Any]:
        """A side that is the identity never gets a decomposition, so it has one from the start."""
        layer = self.layers[index]
        A, G = (
            None if side.block else self.method.identity(side, self.device)
            for side in (layer.A, layer.G)
        )
        return A, G

    @property
    def prepared(self) -> list[bool]:
        """Of each layer, whether both sides have an eigenbasis or inverse."""
        return [A is not None and G is not None for A, G in self._sides]

    def state(self, index: int) -> LayerState:
        """What is kept of a layer: a view, which sees what steps change, but for a decomposition in
        place of another one. Take it anew after a refresh."""
        return LayerState(
            self.terms[index], self.method, *self._sides[index], self._moments_of[index]
        )

    def preconditioner(self, index: int) -> Any:
        """Of a layer, see ``Method.of_layer``; None while a side is missing."""
        return self.state(index).preconditioner

    def rebase(
        self, index: int, A: Decomposition | None = None, G: Decomposition | None = None
    ) -> None:
        """Use new decompositions of one or both sides of a layer from now on. Its moments are
        turned into them."""
        before = self.state(index)
        after = replace(before, A=before.A if A is None else A, G=before.G if G is None else G)
        if before.moments is not None and after.basis is not None:
            before.moments.change_basis_(before.basis, after.basis)
        self._keep(index, after.A, after.G)

    def leave_basis(self, index: int) -> None:
        """Let a layer go on without curvature. Its moments leave the eigenbasis, as far as a
        diagonal can."""
        state = self.state(index)
        if state.basis is not None and state.moments is not None:
            _copy_(state.moments, state.moments.unrotated(state.basis))
        self._keep(index, *self._at_attach(index))

    def load(self, index: int, state: LayerState | None) -> None:
        """Continue a layer from a saved state. Terms and moments are copied; moments that it lacks
        begin at zero.

        Args:
            state: None: that of attach.
        """
        A, G = self._at_attach(index)
        state = (
            LayerState(torch.ones_like(self.terms[index]), self.method) if state is None else state
        )
        self.terms[index].copy_(state.terms)
        if self.moments is not None:
            moments = self._moments_of[index]
            _copy_(moments, state.moments or moments.empty(self.layers[index].shape, self.device))
        self._keep(index, A if state.A is None else state.A, G if state.G is None else state.G)

    def _keep(self, index: int, A: Any, G: Any) -> None:
        """Keep a layer's decompositions, its eigenbases in their places if it has any."""
        ready = self.method.rotates and A is not None and G is not None
        placed = self.method.rotates and (len(self.layers) > 1 or self.stays)
        if placed and ready:
            place = self._place(index)
            _copy_basis_(place.A, A)
            _copy_basis_(place.G, G)
            A, G = place.A, place.G
        elif placed and self.prepared[index]:  # it has left its basis
            place = self._place(index)
            _copy_basis_(place.A, None)
            _copy_basis_(place.G, None)
        self._sides[index] = A, G
        if not placed:
            self.rotation = (
                Rotation.of([LayerBasis(G, A)], self.precision, maps=self.maps) if ready else None
            )
        elif self._stacked is not None:
            self._stacked.follow()
            self.rotation = self._stacked if any(self.prepared) else None

    def _place(self, index: int) -> LayerBasis:
        """Where a layer's eigenbases are, from the group's first one on."""
        if self._stacked is None:
            layer, count = self.layers[0], len(self.layers)
            identity = LayerBasis(_identity(layer.G, self.device), _identity(layer.A, self.device))
            self._stacked = Rotation.of([identity] * count, self.precision, maps=self.maps)
            self._places = self._stacked.by_layer() if count > 1 else [identity]
        return self._places[index]

    def matrices(self, parts: Sequence[Tensor]) -> Tensor:
        """[n, ..] of each layer's gradient: of several layers a copy, of one layer a view."""
        return (
            parts[0].view(self.n, *parts[0].shape[self.maps > 1 :])
            if len(parts) == 1
            else torch.stack(list(parts))
        )

    def by_layer(self, x_nOI: Tensor) -> Sequence[Tensor]:
        """Views, each of its layer's shape."""
        return x_nOI.unflatten(0, (-1, self.maps)).unbind() if self.maps > 1 else x_nOI.unbind()

    def flags(self, of_layers: Sequence[bool], device: torch.device) -> Tensor | None:
        """Of each matrix, bool [n]; None if all are true."""
        if all(of_layers):
            return None
        yes, no = (
            torch.full((), value, dtype=torch.bool, device=device) for value in (True, False)
        )
        return repeated(torch.stack([yes if on else no for on in of_layers]), self.maps)

    def any_map(self, flags_n: Tensor) -> Tensor:
        """Of bool [n] a vector of the layers: whether it is so of any of a layer's matrices."""
        return flags_n if self.maps == 1 else flags_n.view(-1, self.maps).any(dim=1)


def evenly_spaced(parts: Sequence[Tensor]) -> Tensor | None:
    """[n, ..] without a copy: contiguous tensors of one shape that begin at equal distances in one
    memory, as the gradients of equal blocks do at ZeRO-2 and 3. None of others."""
    first, starts = parts[0], [x.storage_offset() for x in parts]
    apart = starts[1] - starts[0] if len(parts) > 1 else first.numel()
    if apart < first.numel() or starts != [
        starts[0] + index * apart for index in range(len(parts))
    ]:
        return None
    memory = first.untyped_storage().data_ptr()
    for x in parts:
        if (
            not x.is_contiguous()
            or x.dtype is not first.dtype
            or x.untyped_storage().data_ptr() != memory
        ):
            return None
    return first.as_strided((len(parts), *first.shape), (apart, *first.stride()), starts[0])


def _identity(side: Side, device: torch.device) -> Eigenbasis:
    """With the eigenvectors that a decomposition of the side will have."""
    groups = side.groups if side.block > 1 else ()
    eyes = (
        torch.eye(width, device=device, dtype=torch.float32).repeat(count, 1, 1)
        for count, width in groups
    )
    return Eigenbasis(tuple(eyes), torch.ones(side.dim, device=device, dtype=torch.float32))


def _copy_basis_(place: Eigenbasis, new: Eigenbasis | None) -> None:
    """Overwrite an eigenbasis. None: by the identity, which eigenvectors that are not there stand
    for, too: a side has none that was the identity when a checkpoint was saved."""
    if new is place:
        return
    eyes = (
        torch.eye(v.shape[-1], device=v.device, dtype=v.dtype).expand_as(v) for v in place.vectors
    )
    vectors = new.vectors if new is not None and new.vectors else eyes
    values = torch.ones_like(place.values) if new is None else new.values
    torch._foreach_copy_([*place.vectors, place.values], [*vectors, values])


def _copy_(moments: Moments, new: Moments) -> None:
    torch._foreach_copy_([*vars(moments).values()], [*vars(new).values()])
