"""nn.Linear: y = x W^T + b, weight [O, I]."""

import torch
from torch import Tensor, nn

from ds_kfac.layers.base import computed_parameter, parameter_shape
from ds_kfac.side import Side


class Linear:
    needs_gradients = False
    takes_bias = True

    def refusal(self, module: nn.Module) -> str | None:
        if not isinstance(module, nn.Linear):
            return ""
        if type(module).forward is not nn.Linear.forward:
            return f"{type(module).__name__} overrides nn.Linear.forward, so its rows are not known"
        return computed_parameter(module)

    def sides(self, module: nn.Module, bias: bool) -> tuple[int, int]:
        out_features, in_features = parameter_shape(module.weight)
        return in_features + bias, out_features

    def input_rows(self, module: nn.Module, x: Tensor) -> Tensor | None:
        return x

    def gradient_rows(
        self, module: nn.Module, x: Tensor | None, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, gradient

    def matrix(self, weight: Tensor, bias: Tensor | None, dims: tuple[int, int]) -> Tensor:
        weight_OI = weight.view(dims[0], -1)
        return weight_OI if bias is None else torch.cat([weight_OI, bias[:, None]], dim=1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        if not has_bias:
            return (matrix_OI.reshape(-1),)
        return matrix_OI[:, :-1].reshape(-1), matrix_OI[:, -1].reshape(-1)

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        return side_A, side_G
