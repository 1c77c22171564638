"""The table of layer types: a new one is a class and a line."""

from torch import nn

from ds_kfac.model.convolutions import Convolution, TransposedConvolution
from ds_kfac.model.layers import ColumnParallelLinear, Conv1D, LayerType, Linear, RowParallelLinear
from ds_kfac.model.norms import BatchNorm, GroupNorm, LayerNorm, RMSNorm

LAYERS: dict[str, LayerType] = {
    "Linear": Linear(),
    "Conv1D": Conv1D(),
    "Conv1d": Convolution(nn.Conv1d),
    "Conv2d": Convolution(nn.Conv2d),
    "Conv3d": Convolution(nn.Conv3d),
    "ConvTranspose1d": TransposedConvolution(nn.ConvTranspose1d),
    "ConvTranspose2d": TransposedConvolution(nn.ConvTranspose2d),
    "ConvTranspose3d": TransposedConvolution(nn.ConvTranspose3d),
    "LayerNorm": LayerNorm(),
    "RMSNorm": RMSNorm(),
    "BatchNorm": BatchNorm(),
    "GroupNorm": GroupNorm(),
    "ColumnParallelLinear": ColumnParallelLinear(),
    "RowParallelLinear": RowParallelLinear(),
}
SHARDS = {"ColumnParallelLinear": "Linear", "RowParallelLinear": "Linear"}
"""Types of a tensor-parallel rank's part of a layer -> the type by which a config chooses them."""
CUT_SIDES = {"ColumnParallelLinear": 0, "RowParallelLinear": 1}
"""Which side of the matrix [O, I] is cut."""

MATRICES = tuple(kind for kind in LAYERS if kind == "Linear" or kind.startswith("Conv"))
"""Types that a config without types takes: linear maps and convolutions."""
TYPES = tuple(kind for kind in LAYERS if kind not in SHARDS)
