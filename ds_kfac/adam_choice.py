"""Which layers' directions KFACAdamW orthogonalizes, and why the others keep Adam's."""

import re

from ds_kfac.config_blocks import AdamConfig
from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import SHARDS

MATRICES = ("Linear", "Conv1D", *SHARDS)
"""Layer types that are orthogonalized; of a tensor-parallel layer every shard by itself, so that a step has the same
size per entry as that of the whole layer."""


def keeps_direction(options: AdamConfig, layer: LayerSpec) -> str | None:
    """Why a layer keeps Adam's direction; None if it is orthogonalized."""
    if not options.orthogonalize:
        return "kfac.adam.orthogonalize is false"
    if len(layer.uses) > 1:
        return "its weight is an embedding's too"
    if layer.kind not in MATRICES:
        return f"{layer.kind} is no linear map's matrix"
    name = layer.uses[0].module
    for pattern in options.except_layers:
        if excepted(pattern, name):
            return f"kfac.adam.except_layers {pattern!r}"
    return None


def excepted(pattern: str, name: str) -> bool:
    """Whether a pattern is the end of a module's name, from a dot or the beginning on: "head" is "head" and "vit.head",
    but neither "lm_head" nor "heads.0.key" nor "head.dense"."""
    return re.search(rf"(?:^|\.)(?:{pattern})$", name) is not None
