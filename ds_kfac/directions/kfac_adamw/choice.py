"""Which layers' directions KFACAdamW orthogonalizes, and why the others keep Adam's."""

from ds_kfac.config.method import AdamConfig
from ds_kfac.model.blocks import named
from ds_kfac.model.layers.base import LayerSpec


def keeps_direction(options: AdamConfig, layer: LayerSpec) -> str | None:
    """Why a layer keeps Adam's direction; None if it is orthogonalized: of a tensor-parallel layer every shard by
    itself, of one in groups every group, so that a step has the same size per entry as that of a whole layer."""
    if not options.orthogonalize:
        return "kfac.adam.orthogonalize is false"
    if layer.keeps_direction is not None:
        return layer.keeps_direction
    pattern = _pattern(options, layer)
    return pattern and f"kfac.adam.except_layers {pattern!r}"


def is_head(options: AdamConfig, layer: LayerSpec) -> bool:
    """Whether a layer makes the model's outputs."""
    return layer.keeps_direction is None and _pattern(options, layer) is not None


def _pattern(options: AdamConfig, layer: LayerSpec) -> str | None:
    name = layer.module
    return next((pattern for pattern in options.except_layers if named(pattern, name)), None)
