"""Which parameters are matrices.

KFACAdamW steps a matrix in no K-FAC layer with its parameter group's ``lr``, and all other
parameters in no layer with ``adam_lr``. The attach report counts matrices by the same rule.
"""

from typing import cast

from torch import nn

from ds_kfac.model.layers import parameter_shape
from ds_kfac.model.product_code import tables
from ds_kfac.model.scan import Scan


def other_matrices(model: nn.Module, scan: Scan) -> set[str]:
    """Return the names of the matrices in no K-FAC layer, trained or frozen.

    Tables, in which rows are looked up as in an embedding, are not matrices.
    """
    in_layers = {name for layer in scan.layers for name in layer.parameters}
    in_tables = tables(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            in_tables.add(cast(nn.Parameter, module.weight))

    names = set[str]()
    for name, parameter in model.named_parameters():
        if name in in_layers or parameter in in_tables or not is_matrix(parameter):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        if _is_multiplied(module, parameter):
            names.add(name)
    return names


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has the shape of a matrix: at least two sides above 1, and several
    outputs."""
    shape = parameter_shape(parameter)
    long_sides = sum(size > 1 for size in shape)
    return long_sides > 1 and shape[0] > 1


def _is_multiplied(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a module's parameter with the shape of a matrix is one.

    With three or more sides, of which one but the last is 1, it was made to be broadcast, unless it
    is the kernel of a linear layer or of a convolution.
    """
    # The parameter is not compared with module.weight: TorchScript has no parameters by name.
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return True
    shape = parameter_shape(parameter)
    return len(shape) == 2 or 1 not in shape[:-1]
