"""Layers of known models as scan would find them, and where ZeRO would put their gradients; no
model is built."""

from collections.abc import Mapping, Sequence

from ds_kfac.assignment.costs import FactorSpec, factor_specs
from ds_kfac.model.layers import LayerSpec
from tests.models import linear_layer

Table = tuple[list[LayerSpec], tuple[FactorSpec, ...]]


def gpt2_small(blocks: int = 12, width: int = 768) -> Table:
    """Conv1D layers with bias."""
    layers = []
    for block in range(blocks):
        for name, inputs, outputs in (("qkv", 1, 3), ("proj", 1, 1), ("up", 1, 4), ("down", 4, 1)):
            layers.append(linear_layer(f"{block}.{name}", inputs * width + 1, outputs * width))
    return layers, factor_specs(layers)


def llama(blocks: int = 16, width: int = 1024, inner: int = 2816, key_width: int = 256) -> Table:
    """Separate projections: q, k, v share their A, gate and up theirs."""
    layers, shared = [], []
    for block in range(blocks):
        shapes = {
            "q": (width, width),
            "k": (width, key_width),
            "v": (width, key_width),
            "o": (width, width),
            "gate": (width, inner),
            "up": (width, inner),
            "down": (inner, width),
        }
        layers += [linear_layer(f"{block}.{name}", *shape) for name, shape in shapes.items()]
        shared += [
            [f"{block}.{name}" for name in names] for names in (("q", "k", "v"), ("gate", "up"))
        ]
    return layers, factor_specs(layers, shared)


def resnet() -> Table:
    """The matrices of ResNet-50's convolutions and its head: a few are far larger than the rest."""
    layers, channels = [linear_layer("stem", 147, 64)], 64
    for width, repeats in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(repeats):
            name = f"{width}.{index}"
            shapes = [(channels, width), (9 * width, width), (width, 4 * width)]
            shapes += [(channels, 4 * width)] if index == 0 else []
            layers += [linear_layer(f"{name}.{i}", *shape) for i, shape in enumerate(shapes)]
            channels = 4 * width
    layers.append(linear_layer("head", 2049, 1000))
    return layers, factor_specs(layers)


TABLES = {"gpt2_small": gpt2_small, "llama": llama, "resnet": resnet}


def zero_shards(layers: Sequence[LayerSpec], world: int) -> Mapping[str, list[int]]:
    """Gradient elements of each layer on each rank, one flat partition as in ZeRO-1/2."""
    size = -(-sum(layer.numel for layer in layers) // world)
    held, start = {}, 0
    for layer in layers:
        stop = start + layer.numel
        pieces = [min(stop, (rank + 1) * size) - max(start, rank * size) for rank in range(world)]
        held[layer.name] = [max(0, piece) for piece in pieces]
        start = stop
    return held
