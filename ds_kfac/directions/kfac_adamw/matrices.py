"""Decide which parameters outside of K-FAC layers are matrices.

For these matrices and their biases KFACAdamW uses the ``lr`` of their parameter group. For all
other parameters outside of K-FAC layers it uses ``adam_lr``. The attach report counts matrices by
the same rule.
"""

from collections.abc import Collection
from typing import cast

from torch import nn

from ds_kfac.model.layers import parameter_shape
from ds_kfac.model.product_code import kernels, tables
from ds_kfac.model.scan import Scan


def other_matrices(model: nn.Module, scan: Scan) -> set[str]:
    """Return the names of the matrices that are in no K-FAC layer, including frozen matrices.

    Tables do not count as matrices. A table is a parameter whose rows are looked up, as in an
    embedding.
    """
    in_layers = {name for layer in scan.layers for name in layer.parameters}
    in_tables = tables_and_embeddings(model)
    names = set[str]()
    for name, parameter in model.named_parameters():
        if name in in_layers or parameter in in_tables:
            continue
        module_name, _, own_name = name.rpartition(".")
        if _is_matrix_of(model.get_submodule(module_name), own_name, parameter):
            names.add(name)
    return names


def biases_of(matrices: Collection[str], names: Collection[str]) -> set[str]:
    """Return the names of the biases that belong to matrices.

    There are two kinds: parameters that are in the same module as a matrix and whose own names
    begin with "bias", such as the biases of a GRU; and parameters whose name is the name of a
    matrix with "_bias" appended. A parametrized weight belongs to the module on which it was
    registered.

    Args:
        names: names of all parameters of the model.
    """
    modules = set[str]()
    for name in matrices:
        module, separator, _ = name.partition("parametrizations.")
        modules.add(module.removesuffix(".") if separator else name.rpartition(".")[0])
    found = {f"{name}_bias" for name in matrices} & set(names)
    for name in names:
        module, _, own_name = name.rpartition(".")
        if module in modules and own_name.startswith("bias"):
            found.add(name)
    return found


def tables_and_embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose rows are looked up."""
    return tables(model) | embeddings(model)


def embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of torch's embedding modules."""
    return {
        cast(nn.Parameter, module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has the shape of a matrix: at least two dimensions are larger than
    1, and there are several outputs."""
    return _long_sides(parameter) > 1 and parameter_shape(parameter)[0] > 1


def _long_sides(parameter: nn.Parameter) -> int:
    return sum(size > 1 for size in parameter_shape(parameter))


def _is_matrix_of(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a module's own parameter is a matrix.

    A parameter with three or more dimensions is not a matrix if a dimension other than the last has
    size 1, because such a parameter is usually made to be broadcast. The kernel of a linear layer
    or of a convolution is an exception, because it may have dimensions of size 1. Examples are the
    kernel of a 1x1 convolution, and a kernel [1, ..] that is modulated for each example.
    """
    # The parameter is not compared with module.weight, because TorchScript modules do not offer
    # parameters by name.
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return is_matrix(parameter)
    shape = parameter_shape(parameter)
    if len(shape) > 2 and 1 in shape[:-1]:
        return _long_sides(parameter) > 1 and name in kernels(module)
    return is_matrix(parameter)
