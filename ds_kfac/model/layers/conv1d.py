"""transformers' Conv1D (GPT-2): y = x W + b, weight [I, O]. Found by its shape, transformers is not imported."""

import torch
from torch import Tensor, nn

from ds_kfac.model.layers.base import computed_parameter, parameter_shape
from ds_kfac.model.layers.linear import Linear


class Conv1D(Linear):
    """Like :class:`Linear`, with the weight transposed."""

    turned = True

    def refusal(self, module: nn.Module) -> str | None:
        if type(module).__name__ != "Conv1D" or not hasattr(module, "nf") or not hasattr(module, "weight"):
            return ""
        if computed := computed_parameter(module):
            return computed
        shape = parameter_shape(module.weight)
        if len(shape) != 2 or shape[1] != module.nf:
            return f"named Conv1D, but its weight {shape} is not [in, nf={module.nf}] as in transformers"
        return None

    def sides(self, module: nn.Module, bias: bool) -> tuple[int, int]:
        in_features, out_features = parameter_shape(module.weight)
        return in_features + bias, out_features

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        weight_OI = weight.view(-1, shape[0]).T
        return weight_OI if bias is None else torch.cat([weight_OI, bias[:, None]], dim=1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        if not has_bias:
            return (matrix_OI.T.reshape(-1),)
        return matrix_OI[:, :-1].T.reshape(-1), matrix_OI[:, -1].contiguous()
