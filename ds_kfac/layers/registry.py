"""The table of layer types: a new one is one file and one line."""

from ds_kfac.layers.base import LayerType
from ds_kfac.layers.conv1d import Conv1D
from ds_kfac.layers.linear import Linear

LAYERS: dict[str, LayerType] = {"Linear": Linear(), "Conv1D": Conv1D()}
