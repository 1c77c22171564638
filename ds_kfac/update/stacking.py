"""Which layers are preconditioned together: small ones of equal shape, whose launches cost more than their products.
And norms of many matrices at once."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import basis_numel
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.rotation import AT_ONCE

S = TypeVar("S", bound=Any)

SMALL_SIDE = 1024
"""Longest side that is stacked. 2 D^3 FLOPs take longer than a launch of some microseconds from about there on, at the
rate of TF32 on a data-center GPU; computed, not measured."""
PIECE = 1 << 22
"""Elements, 32 MiB in float64."""
STACKED_BYTES = 1 << 28
"""Of copies of eigenvectors that a rank keeps for it."""


def stacks(
    layers: Sequence[LayerSpec],
    *,
    alike: Callable[[LayerSpec], Hashable] | None,
    small: int = SMALL_SIDE,
    limit: int = STACKED_BYTES,
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Every layer once, alone or with others of equal shape. Pure.

    Args:
        alike: only layers with the same are put together; None: every layer alone.
        limit: bytes of eigenvectors that are copied; the smallest shapes first, as they gain most.
    """
    if alike is None:
        return tuple((layer,) for layer in layers)
    together: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        sides = (layer.G, layer.A)
        whole = layer.groups == 1 and all(side.block in (0, 1, side.dim) and side.dim <= small for side in sides)
        key = (layer.G, layer.A, alike(layer)) if whole else layer.name
        together.setdefault(key, []).append(layer)
    found: list[tuple[LayerSpec, ...]] = []
    for group in sorted(together.values(), key=lambda group: stacked_bytes(group[:1])):
        room = limit // max(1, stacked_bytes(group[:1]))
        fit = group[:room] if min(room, len(group)) > 1 else []
        limit -= stacked_bytes(fit)
        found += [*([tuple(fit)] if fit else []), *((layer,) for layer in group[len(fit) :])]
    place = {layer.name: index for index, layer in enumerate(layers)}
    return tuple(sorted(found, key=lambda group: place[group[0].name]))


def stacked_bytes(layers: Sequence[LayerSpec]) -> int:
    """Of copies of their eigenvectors and eigenvalues, fp32."""
    return 4 * sum(side.dim + basis_numel(side) for layer in layers for side in (layer.G, layer.A))


def batches(stacks: Sequence[tuple[LayerSpec, ...]], states: Mapping[str, Any]) -> Iterator[tuple[LayerSpec, ...]]:
    """The stacks, for a step: one that lacks an eigenbasis somewhere layer by layer."""
    for layers in stacks:
        if len(layers) == 1 or all(states[layer.name].basis is not None for layer in layers):
            yield layers
        else:
            yield from ((layer,) for layer in layers)


def rounds(
    stacks: Iterable[S], layers: Callable[[S], Sequence[LayerSpec]] = lambda stack: stack, limit: int | None = None
) -> list[list[S]]:
    """What of a step is in memory at a time: stacks of ``limit`` elements, or one that has more, as :func:`in_order`.

    Args:
        layers: of a stack.
        limit: None: :data:`ds_kfac.update.rotation.AT_ONCE`.
    """
    found: list[list[S]] = []
    room, limit = 0, limit or AT_ONCE
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


def norms(x: Tensor) -> Tensor:
    """Norms of vectors [.., n], float64 [..]: the square of a finite number may be infinite in fp32.

    Piece by piece, because of each a copy in float64 may be made.
    """
    parts = [torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64) for piece in x.split(PIECE, dim=-1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).norm(dim=0)


def lengths(matrices: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    """Frobenius norms [n] of n tensors, on a GPU in few launches and without copies; see :func:`norms`."""
    if all(x.numel() <= PIECE or x.device.type != "cpu" for x in matrices):
        return torch.stack(torch._foreach_norm(list(matrices), 2, dtype))
    return torch.stack([norms(x.flatten()) for x in matrices]).to(dtype)


def together(parts: Sequence[Tensor]) -> Tensor:
    """[n, ..] of n tensors; of one itself."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts))


def apart(x: Tensor, count: int) -> Sequence[Tensor]:
    """Inverse of :func:`together`; views."""
    return [x] if count == 1 else x.unbind()


def per_layer(flags: Tensor, count: int) -> Tensor:
    """Bool [n] of n layers' matrices, or of the groups of a single layer: whether it is so of any."""
    return flags if count > 1 else flags.any()
