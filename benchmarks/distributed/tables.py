"""Layers of large models as scan would find them with default settings, without building the
models."""

from collections.abc import Sequence
from dataclasses import dataclass

from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec

MAX_DIM = 16384


@dataclass(frozen=True)
class Table:
    """A model.

    Attributes:
        shared: names of layers that see one input.
    """

    layers: tuple[LayerSpec, ...]
    shared: tuple[tuple[str, ...], ...]


def _layer(name: str, inputs: int, outputs: int) -> LayerSpec:
    """Inputs with the bias, if there is one, counted as one more."""
    A, G = (Side.dense(dim) if dim <= MAX_DIM else Side.diagonal(dim) for dim in (inputs, outputs))
    return LayerSpec(name, "Linear", name, f"{name}.weight", None, A, G)


def _blocks(
    count: int, shapes: dict[str, tuple[int, int]], shared: Sequence[Sequence[str]] = ()
) -> Table:
    layers, groups = [], []
    for block in range(count):
        layers += [_layer(f"{block}.{name}", *shape) for name, shape in shapes.items()]
        groups += [tuple(f"{block}.{name}" for name in names) for names in shared]
    return Table(tuple(layers), tuple(groups))


def gpt2_xl() -> Table:
    """48 blocks of width 1600, with biases; the head is the embedding's weight and left out."""
    width = 1600
    return _blocks(
        48,
        {
            "qkv": (width + 1, 3 * width),
            "out": (width + 1, width),
            "up": (width + 1, 4 * width),
            "down": (4 * width + 1, width),
        },
    )


def llama_7b() -> Table:
    """32 blocks of width 4096, inner 11008; the head's 32000 outputs get a diagonal."""
    width, inner = 4096, 11008
    blocks = _blocks(
        32,
        {
            **dict.fromkeys("qkvo", (width, width)),
            "gate": (width, inner),
            "up": (width, inner),
            "down": (inner, width),
        },
        (("q", "k", "v"), ("gate", "up")),
    )
    return Table((*blocks.layers, _layer("lm_head", width, 32000)), blocks.shared)


def bert_large() -> Table:
    """24 blocks of width 1024, with biases; pooler and the masked head's transform."""
    width = 1024
    blocks = _blocks(
        24,
        {
            **dict.fromkeys("qkvo", (width + 1, width)),
            "up": (width + 1, 4 * width),
            "down": (4 * width + 1, width),
        },
        (("q", "k", "v"),),
    )
    return Table(
        (*blocks.layers, _layer("pooler", width + 1, width), _layer("transform", width + 1, width)),
        blocks.shared,
    )


TABLES = {"GPT-2 XL": gpt2_xl, "Llama-7B": llama_7b, "BERT-Large": bert_large}
