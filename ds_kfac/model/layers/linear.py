"""nn.Linear: y = x W^T + b, weight [O, I]."""

import torch
from torch import Tensor, nn

from ds_kfac.curvature.side import Side
from ds_kfac.model.layers.base import computed_parameter, parameter_shape


class Linear:
    """A matrix [O, I], its bias as last column."""

    needs_gradients = False
    without_bias: str | None = None
    images = False
    turned = False
    """Whether the weight lies [I, O]."""

    def refusal(self, module: nn.Module) -> str | None:
        if not isinstance(module, nn.Linear):
            return ""
        if type(module).forward is not nn.Linear.forward:
            return f"{type(module).__name__} overrides nn.Linear.forward, so its rows are not known"
        return computed_parameter(module)

    def sides(self, module: nn.Module, bias: bool) -> tuple[int, int]:
        out_features, in_features = parameter_shape(module.weight)
        return in_features + bias, out_features

    def groups(self, module: nn.Module) -> int:
        return 1

    def keeps_direction(self, module: nn.Module) -> str | None:
        return None

    def rows(self, x: Tensor, output: Tensor) -> int:
        return output.numel() // max(1, output.shape[-1])

    def input_rows(self, module: nn.Module, x: Tensor) -> Tensor | None:
        return x

    def gradient_rows(
        self, module: nn.Module, x: Tensor | None, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, gradient

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        weight_OI = weight.view(shape[0], -1)
        return weight_OI if bias is None else torch.cat([weight_OI, bias[:, None]], dim=1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        if not has_bias:
            return (matrix_OI.reshape(-1),)
        return matrix_OI[:, :-1].reshape(-1), matrix_OI[:, -1].contiguous()

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        return side_A, side_G
