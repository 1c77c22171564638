"""A head over a large vocabulary is cut into parts of its outputs, a layer each: one owner would be too few.

Only where that changes nothing but who does it: G is the identity, and the update rule steps along rows that no product
mixes, as KFACAdamW does along a head's. The parts have one A, of the same batch. Their names are those of the entries
of a stack, and depend on the layer's shape alone: a checkpoint fits any number of ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ds_kfac.curvature.side import Side
from ds_kfac.model.layers.base import LayerSpec

LARGEST = 1 << 27
"""Elements of a layer that stays whole: a share of 8.6 G parameters on 64 ranks."""
PART = 1 << 25
"""Elements of a part, at most."""


def cut(layers: Iterable[LayerSpec], by_rows: Callable[[LayerSpec], bool]) -> tuple[LayerSpec, ...]:
    """The layers, in their order, large ones as parts.

    Args:
        by_rows: whether the rule's step of an output does not depend on the others.
    """
    found: list[LayerSpec] = []
    for layer in layers:
        parts = _parts(layer) if layer.numel > LARGEST and _divides(layer) and by_rows(layer) else 1
        found += [layer] if parts == 1 else [_part(layer, index, parts) for index in range(parts)]
    return tuple(found)


def _divides(layer: LayerSpec) -> bool:
    """An upright matrix of one module, whose statistics are of A alone; no shard, copy, stack or groups."""
    return (
        layer.kind == "Linear"
        and not layer.product
        and (layer.part, layer.cut, layer.groups, layer.copies) == ((0, 1), (1, 1), 1, 1)
        and layer.A.block > 0
        and layer.G.block == 0
    )


def _parts(layer: LayerSpec) -> int:
    """The smallest number of equal parts that are small enough; 1 if there is none."""
    least = -(-layer.numel // PART)
    return next((n for n in range(least, layer.dim_G + 1) if layer.dim_G % n == 0), 1)


def _part(layer: LayerSpec, index: int, count: int) -> LayerSpec:
    G = Side.identity(layer.dim_G // count)
    names = [f"{layer.name}.{place}" for place in (index, 0)]
    shares = names[1] if index else None
    return replace(layer, name=names[0], G=G, part=(index, count), blocks=(), shares=shares)
