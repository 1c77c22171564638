"""Groups of layers of the same shape. The layers of a group are processed in one batch, because
launching the kernels of a single layer takes longer than running them. This module decides which
layers form a group and in which order groups are processed, and it owns the tensors that the layers
of a group share.

Shape suffixes: O and I are the sides of a layer's matrix. nOI stands for [n, O, I], the matrices of
all layers of a group.
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
"""Limit on the eigenvectors that a rank keeps in stacked tensors, in bytes. During a refresh, twice
as much memory is needed for a short time, because new eigenvectors are copied into the stacks."""


def group_by_shape(
    layers: Sequence[LayerSpec], *, key: Callable[[LayerSpec], Hashable] | None
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Divide layers into groups. A group consists of a single layer, or of several layers of the
    same shape. This is a pure function.

    Layers are grouped as long as the eigenvectors of all grouped layers fit into
    :data:`BATCHED_BYTES`. The layers of the smallest shapes are grouped first, because batches
    speed them up most.

    Args:
        key: function that returns a key for a layer. Layers may be in one group only if their keys
            are equal. None: every layer has a group of its own.
    """
    if key is None:
        return tuple((layer,) for layer in layers)
    by_shape: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        sides = (layer.G, layer.A)
        is_one_matrix = layer.groups == 1
        has_no_blocks = all(side.block in (0, 1, side.dim) for side in sides)
        # a layer that cannot be stacked gets a key that no other layer has
        shape = (*sides, key(layer)) if is_one_matrix and has_no_blocks else layer.name
        by_shape.setdefault(shape, []).append(layer)
    groups: list[tuple[LayerSpec, ...]] = []
    bytes_left = BATCHED_BYTES
    for alike in sorted(by_shape.values(), key=lambda alike: basis_bytes(alike[:1])):
        numel = alike[0].numel
        fitting = bytes_left // max(1, basis_bytes(alike[:1]))
        most_in_group = chunk_budget(batched=True, numel=numel) // numel
        batched = alike[:fitting] if min(fitting, most_in_group, len(alike)) > 1 else []
        bytes_left -= basis_bytes(batched)
        count = -(-len(batched) // max(1, most_in_group))
        groups += [tuple(batched[index::count]) for index in range(count)]
        groups += [(layer,) for layer in alike[len(batched) :]]
    position = {layer.name: index for index, layer in enumerate(layers)}
    return tuple(sorted(groups, key=lambda group: position[group[0].name]))


def basis_bytes(layers: Sequence[LayerSpec]) -> int:
    """Return the bytes of the layers' eigenvectors and eigenvalues in fp32."""
    return 4 * sum(side.dim + side.basis_numel for layer in layers for side in (layer.G, layer.A))


def chunks(
    groups: Iterable[Sequence[LayerSpec]], *, batched: bool
) -> list[list[Sequence[LayerSpec]]]:
    """Divide groups into chunks. All directions of a chunk are in memory at the same time. This is
    a pure function.

    A chunk that consists of several groups has at most as many elements as :func:`chunk_budget`
    allows for its largest layer. Groups and chunks are in the order of :func:`in_order`.
    """
    made: list[list[Sequence[LayerSpec]]] = []
    numel_left = 0
    for group in in_order(groups):
        numel = sum(layer.numel for layer in group)
        if numel > numel_left:
            made.append([])
            numel_left = max(chunk_budget(batched=batched, numel=group[0].numel), numel)
        made[-1].append(group)
        numel_left -= numel
    return made


def in_order(groups: Iterable[S]) -> tuple[S, ...]:
    """Sort groups into the order in which they are processed. This is a pure function.

    The largest matrices come first, because at that time no results are in memory yet. Groups whose
    matrices have the same two sides, in either order, are next to each other.
    """

    def size(group: Sequence[LayerSpec]) -> tuple[int, ...]:
        sides = group[0].shape[-2:]
        return math.prod(sides), *sorted(sides)

    return tuple(sorted(groups, key=size, reverse=True))


class LayerGroup:
    """Layers of the same shape, and all state that a gradient worker keeps for these layers.

    Note: Stacked tensors. If the group has several layers, there is one stacked tensor of each
    kind, and the state of one layer is a slice of it. Terms and moments are allocated when K-FAC
    attaches, and change in place. The stacked eigenvectors are allocated when the first layer gets
    its basis, and new eigenvectors are copied into them. All tensors therefore keep their
    addresses, as a recorded step requires. A layer that is alone in its group has no stacked
    eigenvectors, unless ``stays`` is True. Without stacked eigenvectors, decompositions are kept
    without a copy, so that layers with the same A share the tensors of A.

    Args:
        moments: class of the moments; None: the update rule keeps no moments.

    Attributes:
        layers, names: layers of the group, and their names.
        maps: number of matrices of each layer. It is the number of groups of a grouped convolution,
            otherwise 1.
        n: total number of matrices, summed over the group's layers.
        terms: fp32 [layers], number of loss terms in the last batch that updated each layer's
            factors, see :class:`LayerState`.
        moments: moments of all matrices, as tensors [n, O, I] and [n]; None: the update rule keeps
            no moments.
        rotation: the eigenbases in use. None until some layer has eigenvectors of both sides, and
            always None with a method that has no eigenbases. Layers of the group that have no basis
            yet are rotated by the identity.
        stays: whether eigenvectors must keep their addresses, because a recorded step reads them.
            If True, even a layer that is alone in its group gets a stack. Set this before the first
            refresh.
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
        self.layers = tuple(layers)
        self.names = tuple(layer.name for layer in layers)
        self.maps = layers[0].groups
        self.n = len(layers) * self.maps
        self.method = method
        self.precision = precision
        self.device = torch.device(device)
        self.stays = False
        self.terms = torch.ones(len(layers), device=device, dtype=torch.float32)
        self.moments: Any = None
        self._moments_of: list[Any] = [None] * len(layers)
        if moments is not None:
            self.moments = moments.empty((self.n, *layers[0].shape[-2:]), device)
            self._moments_of = self._views(self.moments)
        self.rotation: Rotation | None = None
        self._stacked: Rotation | None = None  # the stacked eigenbases, once they exist
        self._places: list[LayerBasis] = []  # each layer's views of _stacked
        # decompositions of A and of G for each layer
        self._sides: list[tuple[Any, Any]] = [(None, None)] * len(layers)
        for index in range(len(layers)):
            self._keep(index, *self._at_attach(index))

    def _views(self, moments: Any) -> list[Any]:
        """Return each layer's views of the group's moments."""
        layer_shape = self.layers[0].shape
        views = []
        for x in vars(moments).values():
            shape = layer_shape if x.ndim > 1 else layer_shape[:-2]
            views.append(x.view(len(self.layers), *shape).unbind())
        return [type(moments)(*of_layer) for of_layer in zip(*views, strict=True)]

    def _at_attach(self, index: int) -> tuple[Any, Any]:
        """Return the decompositions (A, G) that a layer has before its first refresh. A side that
        is the identity is never refreshed, so it has its decomposition from the start. For any
        other side the value is None."""
        layer = self.layers[index]
        A = None if layer.A.block else self.method.identity(layer.A, self.device)
        G = None if layer.G.block else self.method.identity(layer.G, self.device)
        return A, G

    @property
    def prepared(self) -> list[bool]:
        """For each layer, whether both sides have an eigenbasis or inverse."""
        return [A is not None and G is not None for A, G in self._sides]

    def state(self, index: int) -> LayerState:
        """Return the state that is kept for a layer.

        The state consists of views, so it shows changes that later steps make in place. It may lack
        the decompositions of a later refresh, so call this method again after a refresh.
        """
        return LayerState(
            self.terms[index], self.method, *self._sides[index], self._moments_of[index]
        )

    def preconditioner(self, index: int) -> Any:
        """Return the layer's preconditioner, see ``Method.of_layer``. Return None while a side has
        no decomposition."""
        return self.state(index).preconditioner

    def rebase(
        self, index: int, A: Decomposition | None = None, G: Decomposition | None = None
    ) -> None:
        """Replace the decompositions of one or both sides of a layer, and rotate the layer's
        moments into the new eigenbasis. A side whose argument is None keeps its decomposition."""
        before = self.state(index)
        after = replace(before, A=before.A if A is None else A, G=before.G if G is None else G)
        if before.moments is not None and after.basis is not None:
            before.moments.change_basis_(before.basis, after.basis)
        self._keep(index, after.A, after.G)

    def leave_basis(self, index: int) -> None:
        """Remove a layer's eigenbasis, so that the layer is updated without curvature from now on.
        The layer's moments are rotated out of the eigenbasis. For a second moment the result is
        approximate, because only the diagonal of a second moment is kept."""
        state = self.state(index)
        if state.basis is not None and state.moments is not None:
            _copy_(state.moments, state.moments.unrotated(state.basis))
        self._keep(index, *self._at_attach(index))

    def load(self, index: int, state: LayerState | None) -> None:
        """Continue a layer from a saved state. Terms and moments are copied. If the state has no
        moments, they start at zero.

        Args:
            state: the saved state; None: the state that the layer had when K-FAC attached.
        """
        A, G = self._at_attach(index)
        if state is None:
            state = LayerState(torch.ones_like(self.terms[index]), self.method)
        self.terms[index].copy_(state.terms)
        if self.moments is not None:
            moments = self._moments_of[index]
            _copy_(moments, state.moments or moments.empty(self.layers[index].shape, self.device))
        self._keep(index, A if state.A is None else state.A, G if state.G is None else state.G)

    def _keep(self, index: int, A: Any, G: Any) -> None:
        """Store a layer's decompositions. Eigenbases are copied into the stack if there is one."""
        has_basis = self.method.rotates and A is not None and G is not None
        is_stacked = self.method.rotates and (len(self.layers) > 1 or self.stays)
        if is_stacked and has_basis:
            place = self._place(index)
            _copy_basis_(place.A, A)
            _copy_basis_(place.G, G)
            A = place.A
            G = place.G
        elif is_stacked and self.prepared[index]:
            # the layer had a basis and has lost it, so from now on it is rotated by the identity
            place = self._place(index)
            _copy_basis_(place.A, None)
            _copy_basis_(place.G, None)
        self._sides[index] = A, G
        if not is_stacked:
            self.rotation = None
            if has_basis:
                self.rotation = Rotation.of([LayerBasis(G, A)], self.precision, maps=self.maps)
        elif self._stacked is not None:
            self._stacked.follow()
            self.rotation = self._stacked if any(self.prepared) else None

    def _place(self, index: int) -> LayerBasis:
        """Return a layer's views of the stacked eigenbases. The stacks are allocated at the first
        call."""
        if self._stacked is None:
            layer = self.layers[0]
            count = len(self.layers)
            identity = LayerBasis(_identity(layer.G, self.device), _identity(layer.A, self.device))
            self._stacked = Rotation.of([identity] * count, self.precision, maps=self.maps)
            # the rotation of a single layer uses the tensors of its basis, not copies
            self._places = self._stacked.by_layer() if count > 1 else [identity]
        return self._places[index]

    def matrices(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the layers' gradients as one tensor [n, O, I]. It is a copy for several layers,
        and a view for a single layer."""
        if len(parts) > 1:
            return torch.stack(list(parts))
        (gradient,) = parts
        return gradient.view(self.n, *gradient.shape[-2:])

    def by_layer(self, x_nOI: Tensor) -> Sequence[Tensor]:
        """Split a tensor of the group into one view for each layer, in the layer's shape."""
        return x_nOI.unflatten(0, (-1, self.maps)).unbind() if self.maps > 1 else x_nOI.unbind()

    def flags(self, of_layers: Sequence[bool], device: torch.device) -> Tensor | None:
        """Return bool [n] with the flag of each matrix's layer, or None if all flags are true."""
        if all(of_layers):
            return None
        # stacked from scalars on the device, because copying a list from the host would wait for
        # the device
        yes = torch.full((), True, dtype=torch.bool, device=device)
        no = torch.full((), False, dtype=torch.bool, device=device)
        return repeated(torch.stack([yes if flag else no for flag in of_layers]), self.maps)

    def any_map(self, flags_n: Tensor) -> Tensor:
        """Return bool [layers], which is True for each layer with a matrix whose flag is True."""
        return flags_n if self.maps == 1 else flags_n.view(-1, self.maps).any(dim=1)


def evenly_spaced(parts: Sequence[Tensor]) -> Tensor | None:
    """Stack tensors of the same shape without a copy, or return None if that is impossible.

    It is possible if the tensors are contiguous and begin at equal distances in one storage, as the
    gradients of a model's identical blocks do at ZeRO-2 and ZeRO-3.
    """
    first = parts[0]
    starts = [x.storage_offset() for x in parts]
    distance = starts[1] - starts[0] if len(parts) > 1 else first.numel()
    expected = [starts[0] + index * distance for index in range(len(parts))]
    if distance < first.numel() or starts != expected:
        return None
    memory = first.untyped_storage().data_ptr()
    for x in parts:
        same_memory = x.untyped_storage().data_ptr() == memory
        if not (same_memory and x.is_contiguous() and x.dtype is first.dtype):
            return None
    return first.as_strided((len(parts), *first.shape), (distance, *first.stride()), starts[0])


def _identity(side: Side, device: torch.device) -> Eigenbasis:
    """Return the identity as a decomposition of the side, with eigenvectors."""
    groups = side.groups if side.block > 1 else ()
    vectors = tuple(
        torch.eye(width, device=device, dtype=torch.float32).repeat(count, 1, 1)
        for count, width in groups
    )
    return Eigenbasis(vectors, torch.ones(side.dim, device=device, dtype=torch.float32))


def _copy_basis_(place: Eigenbasis, new: Eigenbasis | None) -> None:
    """Overwrite an eigenbasis.

    Args:
        new: the new eigenbasis; None: the identity. An eigenbasis without vectors also stands for
            the identity. A checkpoint contains such an eigenbasis if the side was the identity when
            the checkpoint was saved.
    """
    if new is place:
        return
    if new is not None and new.vectors:
        vectors = new.vectors
    else:
        vectors = tuple(
            torch.eye(v.shape[-1], device=v.device, dtype=v.dtype).expand_as(v)
            for v in place.vectors
        )
    values = torch.ones_like(place.values) if new is None else new.values
    torch._foreach_copy_([*place.vectors, place.values], [*vectors, values])


def _copy_(moments: Moments, new: Moments) -> None:
    torch._foreach_copy_([*vars(moments).values()], [*vars(new).values()])
