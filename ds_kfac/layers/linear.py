"""nn.Linear: y = x W^T + b, weight [O, I]."""

import torch
from torch import Tensor, nn

from ds_kfac.layers.base import computed_parameter, parameter_shape


class Linear:
    def refusal(self, module: nn.Module) -> str | None:
        if not isinstance(module, nn.Linear):
            return ""
        if type(module).forward is not nn.Linear.forward:
            return f"{type(module).__name__} overrides nn.Linear.forward, so its rows are not known"
        return computed_parameter(module)

    def features(self, module: nn.Module) -> tuple[int, int]:
        out_features, in_features = parameter_shape(module.weight)
        return in_features, out_features

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1, tensor.shape[-1])

    def matrix(self, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        weight_OI = weight.view(out_features, -1)
        return weight_OI if bias is None else torch.cat([weight_OI, bias[:, None]], dim=1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        if not has_bias:
            return (matrix_OI.reshape(-1),)
        return matrix_OI[:, :-1].reshape(-1), matrix_OI[:, -1].reshape(-1)
