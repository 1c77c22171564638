"""The table of layer types: a new one is one file and one line."""

from ds_kfac.layers.base import LayerType
from ds_kfac.layers.conv1d import Conv1D
from ds_kfac.layers.embedding import Embedding
from ds_kfac.layers.linear import Linear
from ds_kfac.layers.norm import LayerNorm, RMSNorm
from ds_kfac.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear

LAYERS: dict[str, LayerType] = {
    "Linear": Linear(),
    "Conv1D": Conv1D(),
    "Embedding": Embedding(),
    "LayerNorm": LayerNorm(),
    "RMSNorm": RMSNorm(),
    "ColumnParallelLinear": ColumnParallelLinear(),
    "RowParallelLinear": RowParallelLinear(),
}
SHARDS = {"ColumnParallelLinear": "Linear", "RowParallelLinear": "Linear"}
"""Types of a tensor-parallel rank's part of a layer -> the type by which a config chooses them."""

TIED = "Tied"
"""Name, among layer types, of an embedding and a head that share their weight."""
TYPES = (*(kind for kind in LAYERS if kind not in SHARDS), TIED)
