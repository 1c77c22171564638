"""A weight with many outputs as several layers: each has a block of its rows and of G, and all have one A.

They are placed, decomposed and preconditioned apart, so that several ranks share the work of one large layer. The
curvature is that of a G of diagonal blocks. Only types whose rows lie one after the other in memory can be cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import SHARDS
from ds_kfac.side import Side

CUT = ("Linear", *SHARDS)
"""Layer types with one output after the other in memory."""


def row_blocks(layer: LayerSpec, max_outputs: int) -> tuple[LayerSpec, ...]:
    """Blocks as even as possible, none longer than ``max_outputs``; the layer itself if it is not, or cannot be cut.

    A G of diagonal blocks is cut between them.
    """
    if layer.dim_G <= max_outputs or len(layer.uses) > 1 or layer.kind not in CUT:
        return (layer,)
    size = -(-layer.dim_G // -(-layer.dim_G // max_outputs))
    inner = layer.G.block if 1 < layer.G.block < layer.dim_G else 1
    size = -(-size // inner) * inner
    return tuple(_rows(layer, start, min(start + size, layer.dim_G)) for start in range(0, layer.dim_G, size))


def _rows(layer: LayerSpec, start: int, stop: int) -> LayerSpec:
    G = Side(stop - start, stop - start if layer.G.block == layer.dim_G else min(layer.G.block, stop - start))
    use = replace(layer.uses[0], G=G)
    return replace(layer, name=f"{layer.name}.rows_{start}_{stop}", G=G, uses=(use,), rows=(start, stop))


def first_blocks(layers: Sequence[LayerSpec]) -> Mapping[str, str]:
    """Name of each row block -> that of its weight's first one."""
    blocks = [layer for layer in layers if layer.rows is not None]
    firsts = {layer.weight: layer.name for layer in reversed(blocks)}
    return {layer.name: firsts[layer.weight] for layer in blocks}
